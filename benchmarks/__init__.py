"""What it costs. Each file here is a script that prints figures; see the README.

A script may have the name of the package that it measures: this folder, in which Python looks first
when it runs a script, is taken off the path, and the scripts find each other as `benchmarks`.
"""

import sys
from pathlib import Path

_HERE = Path(__file__).parent
sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != _HERE.resolve()]
