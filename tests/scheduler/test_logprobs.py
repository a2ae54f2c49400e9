"""Log-probabilities stay beside the tokens that they are of."""

from __future__ import annotations

from protocol import TokenLogprobs
from scheduler import ModelRunnerOutput
from tests.scheduler.small_scheduler import add, make, request

TOLD = tuple(TokenLogprobs(-float(n), (n,), (-float(n),)) for n in range(4))


def test_each_request_has_its_own() -> None:
    scheduler = make()
    add(scheduler, request("a", 5), request("b", 5), request("c", 5))
    step = scheduler.schedule()
    sampled = {"a": [7], "b": [8], "c": [9]}
    output = ModelRunnerOutput(sampled, logprobs={"a": TOLD[:1], "c": TOLD[1:2]})
    updates = scheduler.update_from_output(step, output)
    assert {update.request.request_id: tuple(update.logprobs) for update in updates} == {
        "a": TOLD[:1],
        "b": (),
        "c": TOLD[1:2],
    }


def test_tokens_behind_the_end_have_none() -> None:
    """Of three that were accepted, the second is a stop token."""
    scheduler = make(spec_method="ngram", num_speculative_tokens=2, async_scheduling=False)
    add(scheduler, request("a", 5))
    scheduler.update_from_output(scheduler.schedule(), ModelRunnerOutput({"a": [7]}))
    scheduler.update_draft_token_ids({"a": [8, 3]})
    step = scheduler.schedule()
    output = ModelRunnerOutput({"a": [8, 3, 9]}, logprobs={"a": TOLD[:3]})
    (update,) = scheduler.update_from_output(step, output)
    assert (list(update.new_token_ids), tuple(update.logprobs)) == ([8, 3], TOLD[:2])
    assert update.finished
