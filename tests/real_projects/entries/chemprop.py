"""Properties of molecules, by message passing on their graphs: as in the project's notebooks on training."""

from chemprop import data, models, nn
from lightning.pytorch import seed_everything

from tests.real_projects.cases import Case, Run

SMILES = ["CCO", "c1ccccc1", "CC(=O)O", "CCN", "C1CCCCC1", "CCCl", "OCCO", "CC(C)C", "c1ccncc1", "CCCC", "N#CC", "CC=O"]


def regression(run: Run, batch_norm: bool = False) -> None:
    molecules = [data.MoleculeDatapoint.from_smi(smi, [len(smi) / 4.0]) for smi in SMILES * 2]
    train, val = data.MoleculeDataset(molecules[:16]), data.MoleculeDataset(molecules[16:])
    scaler = train.normalize_targets()
    val.normalize_targets(scaler)
    loaders = [data.build_dataloader(d, batch_size=8, shuffle=False) for d in (train, val)]

    def make() -> models.MPNN:
        seed_everything(0)
        head = nn.RegressionFFN(input_dim=32, output_transform=nn.UnscaleTransform.from_standard_scaler(scaler))
        return models.MPNN(nn.BondMessagePassing(d_h=32), nn.MeanAggregation(), head, batch_norm=batch_norm)

    trainer, model = run.fit(make, *loaders)
    run.keep(predictions=trainer.predict(model, loaders[1]))


CASES = {
    "regression": Case(regression, "training, resumed; predictions"),
    "batch norm": Case(lambda run: regression(run, batch_norm=True), "the same"),
}
