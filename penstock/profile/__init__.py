"""What every call of a program costs: measured by `measure`, read by the planner as plain data."""

from penstock.profile.data import DeviceProfile, Profile

__all__ = ["DeviceProfile", "Profile"]
