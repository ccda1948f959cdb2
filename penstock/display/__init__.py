"""How things look: text tables, figures, progress. Nothing here knows what it shows."""
