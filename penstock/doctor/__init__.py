"""What this machine has, what would hinder a pipeline, and what to do. No torch here.

`system.py` looks at the machine and `packages.py` at what is installed, without torch. What imports
torch (`devices.py`) and what starts workers (`trial.py`) runs in processes of their own with a time
limit, so that a broken driver or a worker that hangs is a finding.
"""

from penstock.doctor.findings import Finding
from penstock.doctor.looking import examine

__all__ = ["Finding", "examine"]
