"""Views of a run, live and afterwards: `penstock top`, timelines, reports. Needs the extras."""
