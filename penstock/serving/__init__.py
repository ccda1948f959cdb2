"""An HTTP server for one model: requests join and leave while others are generated.

`penstock serve module:build` runs it; `build` may return a `Served`.
"""

from penstock.serving.served import Served

__all__ = ["Served"]
