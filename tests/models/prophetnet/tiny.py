"""A tiny random ProphetNet of fairseq, with a vocabulary like BERT's."""

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import torch

from fastgen.models.prophetnet import BertDictionary, NgramTransformerProphetModel

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(40))]
ENDS = ("encoder", "decoder")
SIZES = {"layers": 2, "embed_dim": 32, "ffn_embed_dim": 64, "attention_heads": 4}


def dictionary(folder: Path) -> BertDictionary:
    path = folder / "vocab.txt"
    path.write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    return BertDictionary.load(str(path))


def prophetnet(
    words: BertDictionary, seed: int = 59, end: float = 3.0, **sizes: object
) -> NgramTransformerProphetModel:
    """Builds weights so large that a wrong key changes tokens, and `end` times the vector of the end."""
    args = {f"{name}_{size}": number for name in ENDS for size, number in SIZES.items()}
    args |= {"max_source_positions": 40, "max_target_positions": 40, **sizes}
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words)
    model = NgramTransformerProphetModel.build_model(Namespace(**args), task).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 1.2 * parameter.shape[1] ** -0.5)
        model.encoder.embed_tokens.weight[words.eos()] *= end
    return model


def tokens(*lengths: int, seed: int = 0, first: int | None = None) -> torch.Tensor:
    """Returns rows of words of these lengths, padded on the right, with `first` in front of each."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(5, len(WORDS), (len(lengths), max(lengths)), generator=generator)
    rows[torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]] = 0
    return rows if first is None else torch.cat([torch.full((len(lengths), 1), first), rows], dim=1)
