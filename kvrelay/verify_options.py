"""The options of `kvrelay verify`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, TypeVar

import typer

from engine import EngineConfig, KernelsChoice, Quantization
from kvrelay.model_options import DEFAULT_MODEL, CacheDir, cache_dir_of
from kvrelay.serve_options import set_up_logging
from protocol import ConfigError

ChoiceT = TypeVar("ChoiceT", bound=StrEnum)


def verify(
    model: Annotated[str, typer.Argument(help="As for `kvrelay serve`.")] = DEFAULT_MODEL,
    prompts: Annotated[int, typer.Option(help="Prompts, of which each way answers all.")] = 24,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each output.")] = 16,
    threads: Annotated[
        int | None,
        typer.Option(help="Threads that compute on each node.", show_default="all cores"),
    ] = None,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="Of keys and values: float32, bfloat16, or auto: float32.")
    ] = "auto",
    quantization: Annotated[
        str | None, typer.Option(help="int8: weights in 8 bits.", show_default="none")
    ] = None,
    kernels: Annotated[
        str, typer.Option(help="compiled, or auto; without a compiler it cannot be done.")
    ] = "auto",
    cache_dir: CacheDir = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "warning",
) -> None:
    """Compute a model's answers in all ways (batched, in chunks, preempted, handed off and so on),
    with batch-invariant kernels, and compare the logits bit for bit. Takes minutes.

    The exit status is 0 if every way was taken and gave the same bits, 1 if not.
    """
    set_up_logging(log_level)
    engine = EngineConfig(
        kv_cache_dtype=kv_cache_dtype,
        quantization=None
        if quantization is None
        else _one(Quantization, "quantization", quantization),
        kernels=_one(KernelsChoice, "kernels", kernels),
        batch_invariant=True,
    )
    # Here, so that other commands do not wait for torch.
    from cluster.exactness import ExactnessConfig
    from kvrelay.console import make_console
    from kvrelay.verify_command import VerifyCommand

    config = ExactnessConfig(prompts=prompts, max_tokens=max_tokens, threads=threads, engine=engine)
    status = VerifyCommand(model, cache_dir_of(cache_dir), config, make_console()).run()
    raise typer.Exit(status)


def _one(kind: type[ChoiceT], field: str, value: str) -> ChoiceT:
    """Raises ConfigError: there is no such choice."""
    if value not in list(kind):
        raise ConfigError(field, f"must be one of {', '.join(kind)}, not {value!r}")
    return kind(value)
