"""Runs of one small program under Ray, one after the other; a line of JSON for each."""

import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import nn

import unisono
from unisono.callbacks import Callback, RayTrain

INPUTS = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
DATA = torch.utils.data.TensorDataset(INPUTS, torch.arange(256) % 3)


class Trouble(Callback):
    """Notes how many workers compute each step; at some, kills one or waits for a node."""

    def __init__(self, folder, kill_at=None, wait_at=()):
        self.folder, self.kill_at, self.wait_at = folder, kill_at, wait_at

    def on_step_begin(self, fit):
        if not fit.is_leader:
            return
        mark = self.folder / f"at-{fit.step}"
        is_first = not mark.exists()
        mark.touch()
        with open(self.folder / "steps", "a") as file:
            file.write(f"{fit.step} {len(fit.ranks)} {os.environ['LOCAL_WORLD_SIZE']}\n")
        if fit.step == self.kill_at and is_first:
            os.kill(os.getpid(), signal.SIGKILL)
        if fit.step in self.wait_at and is_first:
            time.sleep(300)  # Ray ends this process


def await_file(path):
    while not path.exists():
        time.sleep(0.1)


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def make(lr, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    return unisono.Trainer(model, optimizer, loss, shards=4, device="cpu", **options)


def train(config):
    folder = Path(config["folder"])
    callbacks = [RayTrain(), Trouble(folder, config.get("kill_at"), config.get("wait_at", ()))]
    # Another folder after each start, as on another node.
    options = {"directory": folder / f"{time.time_ns()}", "checkpoint": 4}
    trainer = make(config["lr"], callbacks=callbacks, **options)
    trainer.fit(DATA, batch_size=32, epochs=3, validate=DATA)


class Rows(torch.utils.data.IterableDataset):
    def __init__(self, shard):
        self.shard = shard

    def __iter__(self):
        return iter(self.shard.iter_rows())


def train_on_shards(config):
    import ray.train

    shard = ray.train.get_dataset_shard("train")
    rows = [(row["data"], 0) for row in shard.iter_rows()]
    refusals = []
    for given in (shard, shard.to_torch(), Rows(shard), rows):
        try:
            make(0.1).fit(given, batch_size=32, steps=2)
        except (TypeError, unisono.errors.MismatchError) as error:
            refusals.append(f"{type(error).__name__}: {error}"[:70])  # Ray cuts long errors
    raise RuntimeError(f"{len(refusals)} are refused: {refusals}")


def main(base, wanted):
    import ray
    from ray import train as ray_train
    from ray import tune
    from ray.cluster_utils import Cluster
    from ray.train.torch import TorchTrainer
    from ray.tune.integration.ray_train import TuneReportCallback

    memory = {"object_store_memory": 80_000_000}
    head = {"num_cpus": 2, "resources": {"place": 2}, "include_dashboard": False, **memory}
    node = {"num_cpus": 1, "resources": {"place": 1}, "node_ip_address": "127.0.0.2", **memory}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=cluster.address, log_to_driver=bool(os.environ.get("RAY_LOGS")))

    def run(name, function=train, workers=2, callbacks=(), datasets=None, **config):
        folder = base / name
        folder.mkdir()
        each = {"resources_per_worker": {"place": 1}, "elastic_resize_monitor_interval_s": 1}
        running = ray_train.RunConfig(
            name=name,
            storage_path=str(base / "storage"),
            failure_config=ray_train.FailureConfig(max_failures=3 if function is train else 0),
            callbacks=list(callbacks),
        )
        try:
            result = TorchTrainer(
                *(function,),
                train_loop_config={"folder": str(folder), "lr": 1e-2, **config},
                scaling_config=ray_train.ScalingConfig(num_workers=workers, **each),
                run_config=running,
                datasets=datasets,
            ).fit()
        except ray_train.v2.api.exceptions.TrainingFailedError as error:
            return {"error": str(error)}
        steps = [line.split() for line in (folder / "steps").read_text().splitlines()]
        rows = result.metrics_dataframe["step"].tolist()
        return {"metrics": result.metrics, "rows": rows, "steps": steps}

    def trial(config):
        run(f"trial-{config['lr']}", callbacks=[TuneReportCallback()], **config)

    if "killed" in wanted:
        print(json.dumps(run("killed", kill_at=9)), flush=True)
    if "tune" in wanted:
        trials = tune.Tuner(
            trial,
            param_space={"lr": tune.grid_search([1e-2, 3e-3])},
            tune_config=tune.TuneConfig(max_concurrent_trials=1),
            run_config=tune.RunConfig(storage_path=str(base / "tune")),
        ).fit()
        print(json.dumps([one.metrics["digest"] for one in trials]), flush=True)
    if "data" in wanted:
        datasets = {"train": ray.data.range_tensor(64)}
        print(json.dumps(run("data", train_on_shards, datasets=datasets)), flush=True)
    if "elastic" in wanted:
        first = cluster.add_node(**node)
        with ThreadPoolExecutor() as pool:  # nodes are added in the main thread
            done = pool.submit(run, "elastic", workers=(1, 3), wait_at=(9, 17))
            await_file(base / "elastic" / "at-9")
            cluster.remove_node(first)
            await_file(base / "elastic" / "at-17")
            cluster.add_node(**node)
            print(json.dumps(done.result()), flush=True)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    if sys.argv[1] == "plain":
        for lr in (1e-2, 3e-3):
            make(lr).fit(DATA, batch_size=32, epochs=3, validate=DATA)
    else:
        main(Path(sys.argv[1]), sys.argv[2:])
