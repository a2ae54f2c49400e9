"""What an independent implementation generated for SmolLM2-135M-Instruct (float32, greedy).

A correct implementation adds numbers in another order, so where the two best logits nearly tie it
may choose the other one, and what follows is another text. A case is therefore compared up to the
first gap below a threshold.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MODEL = "smollm2-135m"
NUM_OUTPUT_TOKENS = 48
PATH = Path(__file__).resolve().parents[1] / "data" / "reference_smollm2_135m.json"
THRESHOLD = 1e-3


@dataclass(frozen=True)
class ReferenceCase:
    """One prompt and its greedy continuation, which does not stop at eos."""

    name: str
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    gaps: tuple[float, ...]  # between the two best logits, for each output token

    def comparable_length(self, threshold: float = THRESHOLD) -> int:
        """Output tokens in front of the first one that another order of sums might change."""
        risky = (index for index, gap in enumerate(self.gaps) if gap < threshold)
        return next(risky, len(self.gaps))

    def check(self, output_token_ids: Sequence[int], threshold: float = THRESHOLD) -> None:
        """Assert that `output_token_ids` agree as far as they can be compared."""
        count = min(self.comparable_length(threshold), len(output_token_ids))
        actual, expected = tuple(output_token_ids[:count]), self.output_token_ids[:count]
        assert actual == expected, f"{self.name}: {actual} instead of {expected}"


def reference_cases() -> list[ReferenceCase]:
    """All recorded cases."""
    return [
        ReferenceCase(
            name=case["name"],
            prompt_token_ids=tuple(case["prompt"]),
            output_token_ids=tuple(case["output"]),
            gaps=tuple(case["gaps"]),
        )
        for case in json.loads(PATH.read_text())["cases"]
    ]


def comparable_share(cases: Sequence[ReferenceCase], threshold: float = THRESHOLD) -> float:
    """The part of all output positions that is compared."""
    comparable = sum(case.comparable_length(threshold) for case in cases)
    return comparable / sum(len(case.output_token_ids) for case in cases)
