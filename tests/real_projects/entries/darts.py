"""Forecasts by models of the project that train by Lightning, with arguments of its Trainer as its guide gives them."""

import numpy as np
from darts import TimeSeries
from darts.models import BlockRNNModel, NBEATSModel, TFTModel, TransformerModel
from torch import nn

from tests.real_projects.cases import Case, Run

LIGHTNING = "pytorch_lightning"


def series() -> TimeSeries:
    time = np.arange(60)
    values = np.sin(time / 4) + 0.05 * np.random.default_rng(0).normal(size=60)
    return TimeSeries.from_values(values.astype(np.float32))


def forecast(run: Run, model_class: type, **arguments: object) -> None:
    trainer = run.trainer()
    # The model's own argument says whether checkpoints are saved.
    trainer = {name: value for name, value in trainer.items() if name not in ("enable_checkpointing", "logger")}
    lengths = {"input_chunk_length": 12, "output_chunk_length": 4, "n_epochs": 2, "batch_size": 16, "random_state": 0}
    folder = {"work_dir": str(run.folder), "model_name": "made", "save_checkpoints": True, "force_reset": True}
    model = model_class(**lengths, **folder, **arguments, pl_trainer_kwargs=trainer)
    train, val = series()[:44], series()[32:]
    model.fit(train, val_series=val)
    predicted = model.predict(4, series=train).values()
    resumed = model_class.load_from_checkpoint("made", work_dir=str(run.folder), best=False, trusted=True)
    run.keep(predictions=predicted, loaded=resumed.predict(4, series=train).values())


CASES = {
    "N-BEATS": Case(
        lambda run: forecast(run, NBEATSModel, num_stacks=2, num_blocks=1, num_layers=2, layer_widths=16),
        "`fit`, `predict`, checkpoint",
    ),
    "RNN": Case(lambda run: forecast(run, BlockRNNModel, model="LSTM", hidden_dim=8, dropout=0.0), "the same"),
    "Transformer": Case(
        lambda run: forecast(run, TransformerModel, d_model=16, nhead=2, dim_feedforward=16, dropout=0.0), "the same"
    ),
    # With its own likelihood it predicts samples.
    "TFT": Case(
        lambda run: forecast(
            run, TFTModel, hidden_size=8, dropout=0.0, add_relative_index=True, likelihood=None, loss_fn=nn.MSELoss()
        ),
        "the same",
    ),
}
