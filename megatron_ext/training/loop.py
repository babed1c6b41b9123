"""The main loop. It reads as the flow: tasks, rollout, rows, scoring, credit, loss, optimizer step, weights, engine."""

from __future__ import annotations

from megatron_ext.training.measures.step_metrics import rollout_metrics, update_metrics
from megatron_ext.training.run_state import Run


def train_loop(run: Run) -> None:
    """Trains from ``run.step`` to ``run.steps_total``, on every rank; returns early when out of time."""
    while run.goes_on():
        with run.phase("rollout", run.config.batch.tasks_per_step):
            groups = run.collect()
        metrics = rollout_metrics(groups, run.clock.seconds("rollout"), run.gather)
        if groups.batch is not None:
            batch, rows = groups.batch, run.rows(groups.batch)
            opened = run.version
            with run.phase("scoring"):
                scores = run.score(batch, rows)
            advantage, report = run.assign_credit(batch)
            metrics |= report
            with run.phase("update", run.config.batch.optimizer_steps_per_batch):
                results, scores = run.update(groups, batch, rows, scores, advantage)
            metrics |= update_metrics(results, batch, rows, scores, opened, run.clock, run.resumed, run.gather)
            metrics |= run.routing_metrics(batch, scores) | run.routing_losses_done(batch, rows)
            run.keep_samples(groups, opened, scores, advantage, metrics)
        run.finish_step(groups)
        with run.phase("publish"):
            run.publish()
        run.log(metrics)
        if run.evaluation_due():
            run.evaluate_dev()
        if run.checkpoint_due():
            with run.phase("save"):
                run.save()
        run.settle_saves()
