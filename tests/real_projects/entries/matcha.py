"""Speech from text: the project's Lightning module with the settings of its configuration, made small."""

import functools
from types import SimpleNamespace as Settings
from typing import Any

import torch
from lightning.pytorch import seed_everything
from matcha.models.matcha_tts import MatchaTTS
from torch.utils.data import DataLoader

from tests.real_projects.cases import Case, Run
from tests.real_projects.draws import constant

SYMBOLS, MELS, ROWS = 20, 8, 16


def model() -> MatchaTTS:
    seed_everything(0)
    shared = {"n_feats": MELS, "n_channels": 16, "n_spks": 1, "spk_emb_dim": 16, "p_dropout": 0.0, "kernel_size": 3}
    layers = {"filter_channels": 32, "filter_channels_dp": 16, "n_heads": 2, "n_layers": 2, "prenet": True}
    durations = Settings(filter_channels_dp=16, kernel_size=3, p_dropout=0.0)
    encoder = Settings(
        encoder_type="RoPE Encoder", encoder_params=Settings(**shared, **layers), duration_predictor_params=durations
    )
    sizes = {"attention_head_dim": 8, "n_blocks": 1, "num_mid_blocks": 1, "num_heads": 2, "act_fn": "snakebeta"}
    return MatchaTTS(
        n_vocab=SYMBOLS,
        n_spks=1,
        spk_emb_dim=16,
        n_feats=MELS,
        encoder=encoder,
        decoder={"channels": [16, 16], "dropout": 0.0, **sizes},
        cfm=Settings(name="CFM", solver="euler", sigma_min=1e-4),
        data_statistics={"mel_mean": 0.0, "mel_std": 1.0},
        out_size=None,
        optimizer=functools.partial(torch.optim.Adam, lr=1e-3),
    )


def spoken() -> list[dict[str, Any]]:
    """Rows as the project's collator pads them: symbols, and mels whose number four divides."""
    random = torch.Generator().manual_seed(0)
    rows = []
    for index in range(ROWS):
        symbols, mels = 5 + index % 3, 16 + 4 * (index % 3)
        x, y = torch.zeros(8, dtype=torch.long), torch.zeros(MELS, 24)
        x[:symbols] = torch.randint(1, SYMBOLS, (symbols,), generator=random)
        y[:, :mels] = torch.randn(MELS, mels, generator=random)
        rows.append({"x": x, "x_lengths": symbols, "y": y, "y_lengths": mels})
    return rows


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    batch = torch.utils.data.default_collate(rows)
    return {
        **batch,
        "spks": None,
        "filepaths": [f"{index}.wav" for index in range(len(rows))],
        "x_texts": ["made"] * len(rows),
        "durations": None,
    }


def speech(run: Run) -> None:
    # A step draws times and noise.
    with constant(0.5, "torch.rand", "torch.randn_like"):
        run.fit(model, DataLoader(spoken(), batch_size=8, collate_fn=collate))


CASES = {"TTS": Case(speech, "training, resumed")}
