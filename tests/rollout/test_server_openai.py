"""The OpenAI routes: the same responses as /generate, the chat template as transformers renders it."""

import json
from collections.abc import Iterator
from pathlib import Path
from shutil import copy

import pytest
from transformers import AutoTokenizer

from miles_ext.errors import RequestError
from miles_ext.wire import unpack
from rollout.server.model import Model
from tests.rollout.served import PROMPT, PROMPT_IDS, TINY, Served, load, request, sc, serving

TEMPLATE = """{%- if tools %}never{% endif %}
{{- bos_token if bos_token is defined else '' }}
{% for message in messages %}
    {% if message.role == 'system' %}
        {{- message.content | trim }}
        {% continue %}
    {% endif %}
    {{- message.role }}={{ message.content }}{{ eos_token }}
{% endfor %}
{% if messages[0].role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}
{% if add_generation_prompt %}{{ '=' }}{% endif %}{{ suffix | default('') }}{{ messages | tojson }}"""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as one:
        yield one


def test_chat_is_generate_under_openai_names(served: Served) -> None:
    own = load().generate([request(6, capture="head")])[0]
    answer = served.post(
        "/v1/chat/completions",
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": PROMPT[:3]}, {"role": "assistant", "content": PROMPT[3:]}],
            "max_completion_tokens": 60,
            "custom_params": sc(seed=6),
            "return_meta_info": True,
            "return_token_ids": True,
        },
    )
    choice = answer["choices"][0]
    assert choice["prompt_token_ids"] == PROMPT_IDS.tolist()
    assert choice["response_token_ids"] == own.response_ids.tolist()
    assert choice["message"] == {"role": "assistant", "content": own.text}
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", 15)
    assert len(unpack(choice["meta_info"]["sc"])[0]) == len(own) == answer["usage"]["completion_tokens"]
    assert answer["usage"]["total_tokens"] == len(own) + len(PROMPT_IDS)


def test_chat_mask_needs_meta_info_and_without_it_nothing_is_returned(served: Served) -> None:
    body = {"messages": [{"role": "user", "content": PROMPT}], "top_k": 4, "seed": 2, "max_tokens": 8}
    assert "meta_info" not in served.post("/v1/chat/completions", body)["choices"][0]
    body |= {"return_sampling_mask": True, "return_meta_info": True, "return_token_ids": True}
    choice = served.post("/v1/chat/completions", body)["choices"][0]
    masks = choice["meta_info"]["output_token_sampling_mask"]
    assert all(token in mask for token, mask in zip(choice["response_token_ids"], masks, strict=True))
    assert choice["finish_reason"] == "length" and choice["matched_stop"] is None


def test_completions_answer_texts_and_ids_alike(served: Served) -> None:
    body = {"max_tokens": 12, "seed": 3, "return_token_ids": True, "temperature": 0.7}
    one = served.post("/v1/completions", {"prompt": PROMPT, **body})["choices"][0]
    two = served.post("/v1/completions", {"prompt": PROMPT_IDS.tolist(), **body})["choices"][0]
    assert one == two and len(one["token_ids"]) == 12 and one["prompt_token_ids"] == PROMPT_IDS.tolist()
    both = served.post("/v1/completions", {"prompt": [PROMPT, "1+"], "temperature": 0})
    assert [choice["index"] for choice in both["choices"]] == [0, 1]
    assert both["usage"]["prompt_tokens"] == len(PROMPT_IDS) + 2
    assert both["usage"]["completion_tokens"] <= 32  # 16 each by default, as with sglang


def test_chat_template_renders_as_in_transformers(tmp_path: Path) -> None:
    for name in ("tokenizer_config.json", "config.json"):
        copy(TINY / "target" / name, tmp_path)
    tokenizer = json.loads((TINY / "target" / "tokenizer.json").read_text())
    pad = "<|PAD|>"  # put before every plain text, but not before a chat, whose template says what is special
    tokenizer["post_processor"]["single"].insert(0, {"SpecialToken": {"id": pad, "type_id": 0}})
    tokenizer["post_processor"]["special_tokens"][pad] = {"id": pad, "ids": [500], "tokens": [pad]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    model = Model(tmp_path, vocab_size=512, context_length=512)
    messages = [
        {"role": "system", "content": "  12 "},
        {"role": "user", "content": "3+4"},
        {"role": "assistant", "content": "=7"},
    ]
    options = {"suffix": "99"}
    wanted = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False, **options
    )
    assert model.chat_ids(messages, options).tolist() == list(wanted)
    assert model.encode("1").tolist() == [500, 1]
    with pytest.raises(RequestError, match="no tools here"):
        model.chat_ids([{"role": "tool", "content": "1"}], {})


def test_template_and_end_tokens_from_the_other_places(tmp_path: Path) -> None:
    copy(TINY / "target" / "tokenizer.json", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    settings = {"eos_token": {"content": "\n"}, "chat_template": [{"name": "default", "template": "1{{ eos_token }}"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    model = Model(tmp_path, vocab_size=512, context_length=512)
    assert model.eos_ids == (1,)
    assert model.chat_ids([], {}).tolist() == [1, 15]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    model = Model(tmp_path, vocab_size=512, context_length=512)
    assert model.eos_ids == (2, 3)
    with pytest.raises(RequestError, match="no chat template"):
        model.chat_ids([], {})
