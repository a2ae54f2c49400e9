"""Records digests of SmolLM2's tensors as transformers reads them from the GGUF file.

    .venv/bin/pip install accelerate        (transformers wants it for GGUF)
    .venv/bin/python tests/data/record_weights.py MODEL.gguf

writes smollm2_weights.json beside itself: SHA-256 of the float32 bytes of every tensor. That covers
the names, the dequantisation and the order of the rows of q and k.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

OUTPUT = Path(__file__).with_name("smollm2_weights.json")


def main(gguf: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    digests = {
        name: hashlib.sha256(parameter.detach().contiguous().numpy().tobytes()).hexdigest()
        for name, parameter in model.named_parameters()
    }
    OUTPUT.write_text(json.dumps(digests, indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
