"""Whether a way of computing was really taken: without, that all was equal would mean nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cluster.exactness.watched_runner import WatchedRunner
from protocol import ClusterStatus, NodeDraining, NodeInfo, NodeStatus, Role


@dataclass(frozen=True)
class Traces:
    """What a cluster that has answered all prompts leaves behind. All sequences go by node."""

    num_prompts: int
    infos: Sequence[NodeInfo]
    statuses: Sequence[NodeStatus]
    runners: Sequence[WatchedRunner]
    planned_ahead: Sequence[int]  # steps
    early_writes: Sequence[int]  # of KV whose step was still computed; only if it was looked at
    cluster: ClusterStatus

    def total(self, of: Callable[[NodeStatus], int], role: Role | None = None) -> int:
        """Over all nodes, or those of a role."""
        return sum(of(status) for status in self.statuses if role in (None, status.role))


@dataclass(frozen=True)
class Evidence:
    """What happened, in words, and whether that is what the way is about."""

    text: str
    happened: bool


FindEvidence = Callable[[Traces], Evidence]


def all_of(*finds: FindEvidence) -> FindEvidence:
    """All of it has happened."""

    def find(traces: Traces) -> Evidence:
        found = [find(traces) for find in finds]
        return Evidence(", ".join(e.text for e in found), all(e.happened for e in found))

    return find


def alone(traces: Traces) -> Evidence:
    """Each request in steps of its own, its prompt in one."""
    together = max(runner.most_requests for runner in traces.runners)
    pieces = max((len(p) for runner in traces.runners for p in runner.pieces.values()), default=0)
    text = f"{_count(together, 'request')} and {_count(pieces, 'piece')} of a prompt at a time"
    return Evidence(text, together == 1 and pieces == 1)


def batched(traces: Traces) -> Evidence:
    most = max(runner.most_requests for runner in traces.runners)
    return Evidence(f"steps of up to {_count(most, 'request')}", most > 1)


def in_pieces(traces: Traces) -> Evidence:
    pieces = [piece for runner in traces.runners for piece in runner.pieces.values()]
    cut = [piece for piece in pieces if len(piece) > 1]
    sizes = [size for piece in cut for size in piece]
    if not cut:
        return Evidence("no prompt was cut", happened=False)
    most = max(map(len, cut))
    text = (
        f"{_count(len(cut), 'prompt')} cut into up to {most} of {min(sizes)}..{max(sizes)} tokens"
    )
    return Evidence(text, happened=True)


def planned_ahead(traces: Traces) -> Evidence:
    number = sum(traces.planned_ahead)
    return Evidence(f"{_count(number, 'step')} planned while others ran", number > 0)


def cached(traces: Traces) -> Evidence:
    number = traces.total(lambda status: status.num_prefix_hits)
    return Evidence(f"{_count(number, 'cached token')}", number > 0)


def preempted(traces: Traces) -> Evidence:
    number = traces.total(lambda status: status.num_preemptions)
    return Evidence(f"{_count(number, 'preemption')}", number > 0)


def all_preempted(traces: Traces) -> Evidence:
    """As often as there are prompts, at least."""
    found = preempted(traces)
    number = traces.total(lambda status: status.num_preemptions)
    return Evidence(found.text, number >= traces.num_prompts)


def preempted_after_hand_off(traces: Traces) -> Evidence:
    number = traces.total(lambda status: status.num_preemptions, Role.DECODE)
    return Evidence(f"{_count(number, 'preemption')} of decode nodes", number > 0)


def threads_other_than(usual: int) -> FindEvidence:
    def find(traces: Traces) -> Evidence:
        numbers = sorted(set().union(*(runner.threads for runner in traces.runners)))
        text = f"threads: {', '.join(map(str, numbers)) or 'none'}, otherwise {usual}"
        return Evidence(text, bool(numbers) and usual not in numbers)

    return find


def blocks_of(sizes: Sequence[int]) -> FindEvidence:
    def find(traces: Traces) -> Evidence:
        there = [info.block_size for info in traces.infos]
        return Evidence(f"blocks of {' and '.join(map(str, there))} tokens", there == list(sizes))

    return find


def handed_off(traces: Traces) -> Evidence:
    """Every prompt once or more, and to each decode node some."""
    per_node = [s.transfers.committed for s in traces.statuses if s.role is Role.DECODE]
    loaded = traces.total(lambda s: s.num_prompt_tokens_loaded, Role.DECODE)
    text = f"{_count(sum(per_node), 'hand-off')} of {loaded} tokens"
    return Evidence(text, sum(per_node) >= traces.num_prompts and all(per_node) and loaded > 0)


def over(scheme: str) -> FindEvidence:
    """The nodes speak this transport."""

    def find(traces: Traces) -> Evidence:
        schemes = {info.endpoint.partition(":")[0] for info in traces.infos}
        return Evidence(f"over {', '.join(sorted(schemes))}", schemes == {scheme})

    return find


def spread(traces: Traces) -> Evidence:
    """All nodes of each role have computed something."""
    by_role = {
        role: [bool(r.sampled) for r in traces.runners if r.role is role]
        for role in (Role.PREFILL, Role.DECODE)
    }
    busy = {role: sum(did) for role, did in by_role.items()}
    text = f"{busy[Role.PREFILL]} P and {busy[Role.DECODE]} D at work"
    return Evidence(text, all(all(did) and len(did) > 1 for did in by_role.values()))


def layer_by_layer(traces: Traces) -> Evidence:
    number = sum(traces.early_writes)
    return Evidence(f"{_count(number, 'write')} before the end of their step", number > 0)


def migrated(traces: Traces) -> Evidence:
    """Requests for which more than one decode node has made tokens."""
    number = len(_twice(r.sampled for r in traces.runners if r.role is Role.DECODE))
    retries = traces.cluster.retries.get(NodeDraining.label, 0)
    text = f"{_count(number, 'migration')} amid the output, {_count(retries, 'retry', 'retries')}"
    return Evidence(text, number > 0 and retries > 0)


def _twice(sets: Iterable[set[str]]) -> set[str]:
    seen: set[str] = set()
    again: set[str] = set()
    for some in sets:
        again |= seen & some
        seen |= some
    return again


def _count(number: int, noun: str, plural: str | None = None) -> str:
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
