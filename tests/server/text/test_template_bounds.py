"""What one operation of a chat template makes has bounds; other operations are those of Python."""

from __future__ import annotations

import pytest

from bigmodel.server.text.codec import TemplateError, TextCodec
from tests.server.tiny import tiny_tokenizer

codec = TextCodec(tiny_tokenizer())


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10**10 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ (messages * 10**8) | length }}",
        "{{ messages[0]['content'].ljust(10**10) }}",
        "{% set ns = namespace(x='aa') %}{% for _ in range(100) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='aa') %}{% for _ in range(30) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x=3) %}{% for _ in range(100) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    ],
)
def test_a_template_makes_nothing_that_is_too_large(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_tokenizer(), "chat_template", template)
    with pytest.raises(TemplateError, match="an operation makes too much"):
        codec.render_chat([{"role": "user", "content": "b"}])


def test_operators_of_templates_are_those_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    template = (
        "{{ 2 ** 10 }} {{ 2 ** -1 }} {{ 1.5 * 3 }} {{ 'ab' * 2 }} {{ 2 * 'ab' }} {{ [1] + [2] }} {{ 'a'.center(3) }}"
        "{{ 'a' ~ 1 ~ [2] }}{{ 'a' ~ messages[0]['content'] ~ 3 }}|"
    )
    monkeypatch.setattr(tiny_tokenizer(), "chat_template", template)
    assert codec.render_chat([{"role": "user", "content": "b"}]) == "1024 0.5 4.5 abab abab [1, 2]  a a1[2]ab3|"
