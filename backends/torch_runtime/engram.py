"""Which token ids count as the same in n-grams: those whose text is the same once normalised."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, normalizers
from torch import Tensor

from deepinfer.errors import UsageError
from deepinfer.model.numerics import EngramHash

_SPACE = "\ue000"  # stands for a text that is one space, which stripping would empty


def compressed_token_map(tokenizer_file: Path, hashing: EngramHash, vocab_size: int) -> Tensor:
    """Compressed id of every token id, int64 [vocab_size]: numbered by first appearance of a normalised text.

    Texts are normalised by NFKC, without accents, in lower case, white space folded (V4.1's reference). A token that is
    no whole text by itself counts by its name. Raises UsageError when the tokenizer gives another number of ids than
    the model's hash was made for.
    """
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _SPACE),
            normalizers.Strip(),
            normalizers.Replace(_SPACE, " "),
        ]
    )
    numbers: dict[str, int] = {}
    found = []
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token], skip_special_tokens=False)
        name = tokenizer.id_to_token(token) if "\ufffd" in text else normalizer.normalize_str(text) or text
        found.append(numbers.setdefault(name or "", len(numbers)))
    if len(numbers) != hashing.compressed_vocab:
        raise UsageError(
            f"{tokenizer_file} tells {len(numbers)} normalised tokens apart and the model's n-grams "
            f"{hashing.compressed_vocab}: it is another model's tokenizer"
        )
    # Ids that the tokenizer leaves unused never come: any number does.
    return torch.tensor((found + [0] * vocab_size)[:vocab_size])


def made_up_token_map(hashing: EngramHash, vocab_size: int) -> Tensor:
    """A map for weights that are made up and have no tokenizer: as many compressed ids, shared evenly."""
    return torch.arange(vocab_size) % hashing.compressed_vocab
