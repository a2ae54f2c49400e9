"""Records what Hugging Face transformers generates, greedily and in float32.

    python -m tests.reference.record_reference

Writes `tests/data/reference_smollm2_135m.json`. Only needed when the prompts change: the point of
the file is that it comes from an implementation that shares no code with ours.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaForCausalLM

from engine.weights import ModelStore
from tests.reference.cases import MODEL, NUM_OUTPUT_TOKENS, PATH, ReferenceCase, comparable_share
from tests.reference.prompts import reference_prompts


def main() -> None:
    files = ModelStore(Path.home() / ".cache" / "kvrelay").resolve(MODEL)
    model = LlamaForCausalLM.from_pretrained(files.directory, dtype=torch.float32).eval()
    prompts = reference_prompts(
        Tokenizer.from_file(str(files.directory / "tokenizer.json")), chat_of(files.directory)
    )
    cases = []
    for name, prompt in prompts:
        cases.append(record(model, name, prompt))
        sys.stderr.write(f"{name}: {len(prompt)} tokens, {cases[-1].comparable_length()} safe\n")
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(as_json(cases, files.fingerprint))
    sys.stderr.write(f"{len(cases)} cases, {comparable_share(cases):.1%} comparable\n")


def chat_of(directory: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(directory)

    def chat(messages: list[dict[str, str]]) -> list[int]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    return chat


@torch.inference_mode()
def record(model: LlamaForCausalLM, name: str, prompt: list[int]) -> ReferenceCase:
    output: list[int] = []
    gaps: list[float] = []
    inputs, cache = torch.tensor([prompt]), None
    while len(output) < NUM_OUTPUT_TOKENS:
        result = model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        best, second = result.logits[0, -1].topk(2).values.tolist()
        output.append(int(result.logits[0, -1].argmax()))
        gaps.append(best - second)
        inputs, cache = torch.tensor([output[-1:]]), result.past_key_values
    return ReferenceCase(name, tuple(prompt), tuple(output), tuple(gaps))


def as_json(cases: list[ReferenceCase], fingerprint: str) -> str:
    """One line a case."""
    head = {
        "model": MODEL,
        "fingerprint": fingerprint,
        "recorded_with": f"transformers {transformers.__version__}, torch {torch.__version__}",
    }
    lines = [
        json.dumps(
            {
                "name": case.name,
                "prompt": case.prompt_token_ids,
                "output": case.output_token_ids,
                "gaps": [float(f"{gap:.4g}") for gap in case.gaps],
            },
            separators=(",", ":"),
        )
        for case in cases
    ]
    return json.dumps(head)[:-1] + ', "cases": [\n' + ",\n".join(lines) + "\n]}\n"


if __name__ == "__main__":
    main()
