"""Prompts: raw, through a chat template, or as ids; and the small facade for programs."""

from pathlib import Path

import numpy as np
import pytest

import rollkv
from rollkv.errors import UsageError
from rollkv.tasks.generate import TextModel, TextRequest, build_prompt, context_cells, open_text_model

LLAMA = Path(__file__).parent / "fixtures" / "llama.gguf"
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"


@pytest.fixture
def model() -> TextModel:
    return open_text_model(LLAMA)


@pytest.fixture
def chatty(model, monkeypatch) -> TextModel:
    monkeypatch.setattr(model.tokenizer, "chat_template", TEMPLATE)
    return model


def test_chat_is_used_where_the_file_has_a_template(chatty):
    tokenizer = chatty.tokenizer
    assert build_prompt(chatty, TextRequest("hi there")) == tokenizer.encode_rendered("[user]hi there\n[assistant]")
    assert build_prompt(chatty, TextRequest("hi", system="be brief")) == tokenizer.encode_rendered(
        "[system]be brief\n[user]hi\n[assistant]"
    )
    assert build_prompt(chatty, TextRequest("hi", chat=False)) == tokenizer.encode("hi")


def test_without_a_template_the_prompt_is_raw(model):
    assert model.tokenizer.chat_template is None
    assert build_prompt(model, TextRequest("hi")) == model.tokenizer.encode("hi")
    with pytest.raises(UsageError, match="--chat"):
        build_prompt(model, TextRequest("hi", chat=True))


def test_control_tokens_that_a_user_writes_stay_text(chatty):
    tokenizer = chatty.tokenizer
    control = next(token for token in range(tokenizer.vocab_size) if tokenizer.is_control(token) and token not in (tokenizer.bos_id,))
    spelt = tokenizer.piece(control)
    for request in (TextRequest(f"a{spelt}b"), TextRequest("a", system=spelt), TextRequest(f"a{spelt}b", chat=False)):
        assert control not in build_prompt(chatty, request)
    assert tokenizer.encode(spelt, parse_special=True)[-1] == control, "the spelling is not one that could have been read as a token"


def test_the_context_is_never_silently_less():
    assert context_cells(10, 5, None) == 15
    assert context_cells(10, 5, 15) == 15
    assert context_cells(10, 5, 99) == 99
    with pytest.raises(UsageError, match=r"10 tokens and 5 new ones need 15 cells.*14"):
        context_cells(10, 5, 14)


def test_the_facade_generates_and_gives_logits():
    with rollkv.load(LLAMA, backend="host", ctx_size=200, cache_type_k="f32", cache_type_v="f32") as engine:
        generation = engine.generate("one two", max_tokens=12, ignore_eos=True)
        pieces = list(generation)
        assert "".join(pieces) == generation.text and len(generation.ids) == 12 and generation.stop_reason == "length"
        ids = [*generation.prompt_ids, *generation.ids]
        rows = engine.logits(ids)
        assert rows.shape == (len(ids), 512) and rows.dtype == np.float32
        greedy = rows[len(generation.prompt_ids) - 1 : -1].argmax(axis=1)
        assert greedy.tolist() == generation.ids, "what was generated is not what the logits say"
        assert engine.plan["total_pages"] == 1
        with pytest.raises(UsageError, match="200"):
            engine.generate("one two", max_tokens=300)


def test_the_facade_reads_sizes_and_passes_warnings_on():
    heard: list[str] = []
    with rollkv.load(LLAMA, backend="host", vram_target="2GiB", ctx_size=5000, warn=heard.append) as engine:
        assert engine.plan["cap_bytes"] == 2 << 30
    assert any("5000" in message for message in heard), "a context beyond the trained length was not mentioned"
    with pytest.raises(UsageError, match="vram_target"):
        rollkv.load(LLAMA, backend="host", vram_target="much")


def test_an_unknown_name_of_the_package_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nothing_like_it"):
        rollkv.nothing_like_it  # noqa: B018
