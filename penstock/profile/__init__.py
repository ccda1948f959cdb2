"""What every call of a program costs: measured by `measure`, read by the planner as plain data."""

from penstock.profile.data import Confidence, DeviceProfile, Link, Profile

__all__ = ["Confidence", "DeviceProfile", "Link", "Profile"]
