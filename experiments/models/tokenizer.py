"""The character tokenizer of the tiny models, written as ordinary Hugging Face tokenizer files."""

from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from experiments.tasks import addition

# A chat is its messages run together: the model knows no roles.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; ids without a character have placeholder names, so every id of the model decodes."""
    vocabulary = {char: i for i, char in enumerate(addition.CHARACTERS)}
    special = {addition.PAD_ID: "<|PAD|>", addition.MASK_ID: "<|MASK|>", addition.UNKNOWN_ID: "<|UNKNOWN|>"}
    for i in range(len(vocabulary), addition.VOCAB_SIZE):
        vocabulary[special.get(i, f"<|{i}|>")] = i
    backend = Tokenizer(WordLevel(vocabulary, unk_token=special[addition.UNKNOWN_ID]))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special.values()])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="\n",
        pad_token=special[addition.PAD_ID],
        mask_token=special[addition.MASK_ID],
        unk_token=special[addition.UNKNOWN_ID],
        model_max_length=512,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def save_tokenizer(folder: str | Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template into `folder`."""
    build_tokenizer().save_pretrained(folder)
