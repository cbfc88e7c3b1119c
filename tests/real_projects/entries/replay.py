"""Recommendations from histories: SASRec in the project's own Lightning module."""

from typing import Any

import torch
from lightning.pytorch import seed_everything
from replay.data import FeatureHint, FeatureSource, FeatureType
from replay.data.nn import TensorFeatureInfo, TensorFeatureSource, TensorSchema
from replay.nn.lightning import LightningModule
from replay.nn.sequential import SasRec
from torch.utils.data import DataLoader

from tests.real_projects.cases import Case, Run

ITEMS, LENGTH = 20, 8


def schema() -> TensorSchema:
    item = TensorFeatureInfo(
        "item_id",
        is_seq=True,
        feature_type=FeatureType.CATEGORICAL,
        feature_hint=FeatureHint.ITEM_ID,
        feature_sources=[TensorFeatureSource(FeatureSource.INTERACTIONS, "item_id")],
        embedding_dim=16,
        padding_value=ITEMS,
        cardinality=ITEMS,
    )
    return TensorSchema([item])


def histories(trains: bool) -> list[dict[str, Any]]:
    """Rows as the project's transforms make them: padded on the left, labels one item further."""
    random = torch.Generator().manual_seed(0)
    rows = []
    for index in range(20):
        items = torch.randint(ITEMS, (LENGTH + 1,), generator=random)
        is_there = torch.arange(LENGTH) >= index % LENGTH
        row = {"feature_tensors": {"item_id": items[:-1].where(is_there, ITEMS)}, "padding_mask": is_there}
        labels = {"positive_labels": items[1:, None], "target_padding_mask": is_there[:, None]}
        rows.append({**row, **labels} if trains else row)
    return rows


def recommend(run: Run) -> None:
    def make() -> LightningModule:
        seed_everything(0)
        sizes = {"embedding_dim": 16, "num_heads": 2, "num_blocks": 2, "max_sequence_length": LENGTH}
        return LightningModule(SasRec.from_params(schema(), dropout=0.0, **sizes))

    trainer, model = run.fit(make, DataLoader(histories(True), batch_size=8))
    run.keep(predictions=trainer.predict(model, DataLoader(histories(False), batch_size=8)))


def targets(batch: Any) -> float:
    # Batches of predict_step have none.
    return float(batch.get("target_padding_mask", batch["padding_mask"]).sum())


CASES = {
    "SASRec": Case(
        recommend,
        "training, resumed; predictions",
        {"loss_weight": targets},
        "loss_weight=targets that are not padding",
    ),
}
