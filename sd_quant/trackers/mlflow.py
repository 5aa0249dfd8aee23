"""MLflow tracker with a SQLite database; view with ``mlflow ui --backend-store-uri sqlite:///<store>/mlflow.db``.

Writing needs only ``mlflow-skinny`` with SQLAlchemy and Alembic; viewing needs the whole of mlflow. The module creates
its own client, so it changes neither the process's tracking URI nor its active run. Alternative not taken: MLflow's
store of plain files, which MLflow no longer develops.
"""

import os
from pathlib import Path

from filelock import FileLock

from sd_quant.trackers import Run

EXPERIMENT = "sd-quant"
MOST_PARAMS, MOST_METRICS = 100, 1000  # MLflow's limits for one call
PATIENCE = 60  # seconds that a run waits for other runs to write


def log(run: Run, store: Path) -> None:
    """Log a run in ``store/mlflow.db``, its image in ``store/mlflow``. Raises ImportError without MLflow's package."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when MLflow is imported: it would call home
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient

    store = store.absolute()
    store.mkdir(parents=True, exist_ok=True)
    params = [Param(name, str(value)) for name, value in run.knobs.items()]
    with FileLock(store / "mlflow.lock", timeout=PATIENCE):  # two that create the database at once break it
        client = MlflowClient(f"sqlite:///{store / 'mlflow.db'}")
        experiment = client.get_experiment_by_name(EXPERIMENT)
        place = (
            experiment.experiment_id
            if experiment
            else client.create_experiment(EXPERIMENT, artifact_location=(store / "mlflow").as_uri())
        )
        info = client.create_run(place, run_name=run.name).info
        series = {name: [value] for name, value in run.metrics.items()} | run.series
        metrics = [
            Metric(name, value, info.start_time, step)
            for name, values in series.items()
            for step, value in enumerate(values, start=1)
            if value is not None
        ]
        status = "FAILED"
        try:
            for start in range(0, len(params), MOST_PARAMS):
                client.log_batch(info.run_id, params=params[start : start + MOST_PARAMS])
            for start in range(0, len(metrics), MOST_METRICS):
                client.log_batch(info.run_id, metrics=metrics[start : start + MOST_METRICS])
            if run.image:
                client.log_artifact(info.run_id, str(run.image), run.image.parent.name)
            status = "FINISHED"
        finally:
            client.set_terminated(info.run_id, status)
