from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from engine.weights import ModelFiles
from gateway.chat_template import ChatTemplate
from protocol import InvalidRequest, ModelError
from tests.engine.weights.tiny_models import write_hf_directory, write_json

USER = [{"role": "user", "content": "Hi"}]


def render(source: str, messages: list[dict[str, Any]] = USER, **tokens: str) -> str:
    return ChatTemplate(source, tokens).render(messages)


def load(directory: Path) -> ChatTemplate:
    return ChatTemplate.load(ModelFiles.read("m", directory))


def test_generation_prompt() -> None:
    template = ChatTemplate(
        "{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}", {}
    )
    assert template.render(USER) == "Hi>"
    assert template.render(USER, add_generation_prompt=False) == "Hi"


def test_special_tokens() -> None:
    assert render("{{ bos_token }}|{{ eos_token }}|{{ pad_token }}", bos_token="<s>") == "<s>||"


def test_blocks_leave_no_white_space() -> None:
    source = (
        "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}"
    )
    assert render(source) == "Hi\n"


def test_tojson_is_not_for_html() -> None:
    source = (
        "{{ messages | tojson }} {{ {'b': 1, 'a': '<é&>'} | tojson(indent=1, sort_keys=True) }}"
    )
    expected = '[{"role": "user", "content": "Hi"}] {\n "a": "<é&>",\n "b": 1\n}'
    assert render(source) == expected


def test_strftime_now() -> None:
    template = ChatTemplate(
        "{{ strftime_now('%d %b %Y') }}", {}, now=lambda: datetime(2024, 11, 30)
    )
    assert template.render(USER) == "30 Nov 2024"


def test_generation_tag_and_loop_controls() -> None:
    source = (
        "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    assert render(source, [{"content": c} for c in "abc"]) == "ac"


def test_null_counts_as_absent() -> None:
    source = "{{ 'calls' if 'tool_calls' in messages[0] else 'plain' }}"
    assert render(source, [{"role": "assistant", "content": "x", "tool_calls": None}]) == "plain"


def test_tools() -> None:
    template = ChatTemplate("{{ tools | tojson if tools is not none else 'none' }}", {})
    assert template.render(USER) == "none"
    assert template.render(USER, tools=[{"type": "function"}]) == '[{"type": "function"}]'


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses .*: roles must alternate"),
        ("{{ messages[3].content }}", "refuses"),
        ("{{ messages[0].content + 1 }}", "refuses"),
        ("{{ messages[0].nothing.at.all }}", "refuses"),
        ("{{ 1 // 0 }}", "refuses"),
        ("{{ 'x' | int + [] }}", "refuses"),
        ("{{ ().__class__.__bases__ }}", "refuses .*unsafe"),
        ("{{ messages.append(1) }}", "refuses .*"),
        ("{{ range(10 ** 9) | list }}", "refuses .*"),
    ],
)
def test_what_a_template_refuses_is_the_client_s_mistake(source: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        render(source)
    assert caught.value.field == "messages"


def test_messages_are_never_a_template() -> None:
    assert render("{{ messages[0].content }}", [{"content": "{{ 7 * 7 }}"}]) == "{{ 7 * 7 }}"


def test_a_model_without_a_template(tmp_path: Path) -> None:
    template = load(write_hf_directory(tmp_path))
    with pytest.raises(InvalidRequest, match="has no chat template") as caught:
        template.render(USER)
    assert caught.value.field == "messages"


def test_a_template_that_does_not_compile(tmp_path: Path) -> None:
    (write_hf_directory(tmp_path) / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ModelError, match=r"chat_template\.jinja: .*does not compile"):
        load(tmp_path)


@pytest.mark.parametrize("token", ["<s>", {"content": "<s>", "lstrip": False}])
def test_template_and_tokens_of_tokenizer_config(tmp_path: Path, token: object) -> None:
    write_hf_directory(tmp_path)
    config = {"chat_template": "{{ bos_token }}a", "bos_token": token, "eos_token": None}
    write_json(tmp_path / "tokenizer_config.json", config)
    assert load(tmp_path).render(USER) == "<s>a"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}b")
    assert load(tmp_path).render(USER) == "<s>b"


def test_the_default_of_several_templates(tmp_path: Path) -> None:
    write_hf_directory(tmp_path)
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": named})
    assert load(tmp_path).render(USER) == "d"


@pytest.mark.parametrize("content", [b"{", b"\xff", b'{"chat_template": 3}'])
def test_broken_tokenizer_config(tmp_path: Path, content: bytes) -> None:
    files = ModelFiles.read("m", write_hf_directory(tmp_path))
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        ChatTemplate.load(files)


def test_a_template_that_is_no_text(tmp_path: Path) -> None:
    (write_hf_directory(tmp_path) / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match="not UTF-8"):
        load(tmp_path)
