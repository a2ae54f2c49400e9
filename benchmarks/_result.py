"""How a benchmark tells what it measured: a table, or one JSON object a line with --json."""

import json
import sys
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Result:
    """`value` against `reference`, both measured in the same run."""

    name: str
    value: float
    unit: str
    reference: float
    what: str  # the reference is, in words

    @property
    def ratio(self) -> float:
        return self.value / self.reference


def report(results: list[Result]) -> None:
    """Print all results as the command line asks."""
    for result in results:
        if "--json" in sys.argv[1:]:
            line = asdict(result) | {"ratio": round(result.ratio, 4)}
            print(json.dumps(line), flush=True)
        else:
            print(
                f"{result.name:28} {result.value:10.3f} {result.unit:8}"
                f"{result.ratio:7.3f} x {result.what} ({result.reference:.3f})",
                flush=True,
            )
