"""Forecasts of several series by the project's core class, with arguments of Lightning's Trainer for each model."""

import numpy as np
import pandas as pd
from neuralforecast import NeuralForecast
from neuralforecast.losses.pytorch import MQLoss
from neuralforecast.models import LSTM, NHITS, PatchTST

from tests.real_projects.cases import Case, Run

LIGHTNING = "pytorch_lightning"


def frame() -> pd.DataFrame:
    days = pd.date_range("2020-01-01", periods=48)
    parts = [
        pd.DataFrame({"unique_id": name, "ds": days, "y": 2 + np.sin(np.arange(48) / (3 + index))})
        for index, name in enumerate("abcdefgh")
    ]
    return pd.concat(parts).astype({"y": np.float32})


def forecast(run: Run, model_class: type, **arguments: object) -> None:
    trainer = run.trainer()
    lengths = {"h": 4, "input_size": 12, "max_steps": 4, "batch_size": 8, "random_seed": 0, "val_check_steps": 2}
    # All windows of a series: which of them a step takes is a draw otherwise.
    windows = {"windows_batch_size": None, "inference_windows_batch_size": -1}
    model = model_class(**lengths, **windows, **arguments, **trainer)
    forecasts = NeuralForecast(models=[model], freq="D")
    forecasts.fit(df=frame(), val_size=4)
    predicted = forecasts.predict()
    forecasts.save(str(run.folder / "saved"), overwrite=True)
    loaded = NeuralForecast.load(str(run.folder / "saved"))
    # Files of the project hold no strategy, and say so: it is set again.
    loaded.models[0].trainer_kwargs.update(run.trainer())
    values = [found.drop(columns=["unique_id", "ds"]).to_numpy() for found in (predicted, loaded.predict())]
    run.keep(predictions=values[0], loaded=values[1])


CASES = {
    "NHITS": Case(lambda run: forecast(run, NHITS, mlp_units=[[16, 16]] * 3), "`fit`, `predict`, saved and loaded"),
    "LSTM": Case(lambda run: forecast(run, LSTM, encoder_hidden_size=8, decoder_hidden_size=8), "the same"),
    "PatchTST": Case(
        lambda run: forecast(
            run, PatchTST, hidden_size=16, n_heads=2, patch_len=4, stride=2, loss=MQLoss(level=[80]), dropout=0.0
        ),
        "the same, `MQLoss`",
    ),
}
