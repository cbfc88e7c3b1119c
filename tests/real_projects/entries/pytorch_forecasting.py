"""Forecasts of several series, as in the project's tutorials: TFT with covariates, N-BEATS, DeepAR."""

import numpy as np
import pandas as pd
from lightning.pytorch import seed_everything
from pytorch_forecasting import DeepAR, NBeats, TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.data import GroupNormalizer, NaNLabelEncoder
from pytorch_forecasting.metrics import MAE, SMAPE, NormalDistributionLoss, QuantileLoss

from tests.real_projects.cases import Case, Run


def frame() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    time = np.tile(np.arange(24), 4)
    sales = 3 + np.sin(time / 3) + 0.1 * rng.normal(size=len(time))
    store = np.repeat(list("abcd"), 24)
    return pd.DataFrame({"time": time, "store": store, "sales": sales, "price": rng.uniform(1, 2, len(time))})


COVARIATES = {"static_categoricals": ["store"], "time_varying_known_reals": ["time", "price"]}


def forecast(run: Run, model: type, more: dict[str, object], **arguments: object) -> None:
    lengths = {"max_encoder_length": 8, "min_encoder_length": 8, "max_prediction_length": 4, "min_prediction_length": 4}
    data = TimeSeriesDataSet(
        frame(),
        time_idx="time",
        target="sales",
        group_ids=["store"],
        time_varying_unknown_reals=["sales"],
        categorical_encoders={"store": NaNLabelEncoder().fit(frame().store)},
        **lengths,
        **more,
    )
    val = TimeSeriesDataSet.from_dataset(data, frame(), predict=True)
    loaders = [data.to_dataloader(train=True, batch_size=16), val.to_dataloader(train=False, batch_size=4)]

    def make() -> object:
        seed_everything(0)
        return model.from_dataset(data, learning_rate=0.01, log_interval=-1, **arguments)

    _, trained = run.fit(make, *loaders, gradient_clip_val=0.1, limit_train_batches=3)
    # It adds a callback of its own to none.
    predictor = {name: value for name, value in run.trainer().items() if name != "callbacks"}
    run.keep(predictions=trained.predict(loaders[1], trainer_kwargs=predictor))


def tft(run: Run) -> None:
    more = {**COVARIATES, "target_normalizer": GroupNormalizer(groups=["store"]), "add_relative_time_idx": True}
    sizes = {"hidden_size": 8, "attention_head_size": 2, "hidden_continuous_size": 8, "dropout": 0.0}
    forecast(run, TemporalFusionTransformer, more, loss=QuantileLoss(), logging_metrics=[SMAPE(), MAE()], **sizes)


def nbeats(run: Run) -> None:
    forecast(run, NBeats, {}, widths=[16, 32], backcast_loss_ratio=0.1)


def deepar(run: Run) -> None:
    sizes = {"hidden_size": 8, "rnn_layers": 2, "dropout": 0.0}
    forecast(run, DeepAR, COVARIATES, loss=NormalDistributionLoss(), **sizes)


CASES = {
    "TFT": Case(tft, "training, resumed; predictions"),
    "N-BEATS": Case(nbeats, "the same"),
    "DeepAR": Case(deepar, "the same"),
}
