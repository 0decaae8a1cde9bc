"""Chat templates: golden renders in the style of six families, and templates that are broken, refuse, or mean harm."""

import os
from datetime import datetime
from pathlib import Path

import pytest

from rollkv.chat import MAX_OUTPUT_CHARS, render_chat
from rollkv.errors import UnsupportedModelError, UsageError
from rollkv.gguf_file import open_gguf

REAL_MODELS = Path(os.environ.get("ROLLKV_MODELS", Path.home() / ".cache/rollkv/models"))
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": " What is <2> & 3? "}
TURNS = [SYSTEM, USER, {"role": "assistant", "content": "5"}, {"role": "user", "content": "No."}]

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}"
    "{% endif %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages[::-1] %}
    {%- if message.role == "user" and ns.last == 0 %}{%- set ns.last = messages|length - loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not\n supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}{% for message in rest %}{% if message.role == 'user' %}"
    "{{ ' [INST] ' + (system + '\n\n' if loop.first and system else '') + message.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + message.content + eos_token }}{% endif %}{% endfor %}"
)
# Blocks on lines of their own and no dash markers: right only with block trimming and left stripping.
GLM = """[gMASK]<sop>
{% for message in messages %}
    {% if message.role == 'system' %}
        {% continue %}
    {% endif %}
<|{{ message.role }}|>
{{ message.content }}
    {% if loop.index > 6 %}
        {% break %}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|assistant|>
{% endif %}
"""


def render(template, messages=TURNS, **options):
    return render_chat(template, messages, **{"bos_token": "<s>", "eos_token": "</s>", **options})


@pytest.mark.parametrize(
    ("template", "messages", "options", "wanted"),
    [
        (
            CHATML,
            [USER],
            {},
            "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\n What is <2> & 3? <|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            LLAMA3,
            TURNS[:2],
            {},
            "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
            "What is <2> & 3?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            QWEN,
            TURNS[:2],
            {"variables": {"enable_thinking": False}},
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n What is <2> & 3? <|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n",
        ),
        (
            QWEN,
            [],
            {"tools": [{"name": "<é>", "n": 1}]},
            '<|im_start|>system\n# Tools\n{"name": "<é>", "n": 1}<|im_end|>\n<|im_start|>assistant\n',
        ),
        (
            GEMMA,
            TURNS[1:],
            {},
            "<s><start_of_turn>user\nWhat is <2> & 3?<end_of_turn>\n<start_of_turn>model\n5<end_of_turn>\n"
            "<start_of_turn>user\nNo.<end_of_turn>\n<start_of_turn>model\n",
        ),
        (MISTRAL, TURNS, {}, "<s> [INST] Be brief.\n\n What is <2> & 3?  [/INST] 5</s> [INST] No. [/INST]"),
        (GLM, TURNS, {}, "[gMASK]<sop>\n<|user|>\n What is <2> & 3? \n<|assistant|>\n5\n<|user|>\nNo.\n<|assistant|>\n"),
        (GLM, TURNS[:1], {"add_generation_prompt": False}, "[gMASK]<sop>\n"),
    ],
    ids=["chatml", "llama3", "qwen", "qwen-tools", "gemma", "mistral", "glm", "glm-without-answer"],
)
def test_golden_renders(template, messages, options, wanted):
    assert render(template, messages, **options) == wanted


def test_the_template_of_a_real_model():
    path = REAL_MODELS / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.exists():
        pytest.skip(f"{path.name} is not in {REAL_MODELS}")
    with open_gguf(path) as file:
        template = file.metadata["tokenizer.chat_template"]
    assert render(template, TURNS[:2]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n What is <2> & 3? <|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_refusal_is_one_line_in_the_templates_words():
    with pytest.raises(UsageError, match=r"refuses these messages: System role not supported;.*--raw") as caught:
        render(GEMMA, TURNS)
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="roles must alternate"):
        render(GEMMA, [USER, USER])


def test_training_tags_are_ignored_and_others_are_not():
    assert render("a{% generation %}{{ messages[0].role }}{% endgeneration %}b") == "asystemb"
    with pytest.raises(UnsupportedModelError, match=r"not valid \(line 2.*unknown tag 'training'.*--raw"):
        render("a\n{% training %}")


def test_helpers():
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.now().year - 1), str(datetime.now().year)}
    assert render("{{ messages[0] | tojson }}") == '{"role": "system", "content": "Be brief."}'
    assert (
        render("{{ [1, '<&>'] | tojson(indent=1) }}{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}") == '[\n 1,\n "<&>"\n]{"a": 2, "b": 1}'
    )
    assert render("{{ messages[1].content }}", [SYSTEM, {"role": "user", "content": "日本 🙂 \udc80"}]) == "日本 🙂 \udc80"


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{% if %}", "line 1"),
        ("{{ messages[9].content }}", "UndefinedError"),
        ("{{ 1 + 'a' }}", "TypeError"),
        ("{% include 'x' %}", "no loader"),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "RecursionError"),
        ("{{ ''.__class__.__mro__ }}", "must not have"),
        ("{{ cycler.__init__.__globals__ }}", "must not have"),
        ("{{ messages.append(1) }}", "must not have"),
        ("{{ messages[0].update({}) }}", "must not have"),
        ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
        ("{{ 'x' * 10**10 }}", "memory"),
        ("{{ '%9999999999d' % 1 }}", "memory"),
        ("{% for i in range(60000) %}{{ 'x' * 1000 }}{% endfor %}", f"more than {MAX_OUTPUT_CHARS} characters"),
    ],
)
def test_templates_that_fail_or_mean_harm(template, told):
    with pytest.raises(UnsupportedModelError) as caught:
        render(template)
    message = str(caught.value)
    assert told in message and "--raw" in message and "chat template in the model file" in message and "\n" not in message


def test_a_template_without_end_is_stopped():
    with pytest.raises(UnsupportedModelError, match="more than 1 s"):
        render("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", max_seconds=1)


def test_messages_must_be_plain_data():
    with pytest.raises(UsageError, match="plain data"):
        render(CHATML, [{"role": "user", "content": object()}])
