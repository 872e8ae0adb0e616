"""Mutations of what makes replicas converge, and where they run."""

from catalogue.mutation import Mutation

FLEET = (
    Mutation(
        "fallback_owes_nothing",
        "fleet/reconcile.py",
        "served = report.signalled or serving_generation(report)",
        "served = serving_generation(report)",
        "KV that a fallback computed is not used against the policy of a signal that came after its snapshot.",
        ("control/test_reconciler.py::test_a_replica_that_fell_back_owes_the_policies_of_all_later_signals",),
    ),
    Mutation(
        "unproved_replica_joins",
        "fleet/reconcile.py",
        "if report.stage is Stage.CHECKING and report.snapshot == state.snapshot:",
        "if report.stage is Stage.COMMITTING and report.snapshot == state.snapshot:",
        "A replica that starts takes no requests before what it loaded is proved.",
        ("control/test_reconcile.py",),
    ),
    Mutation(
        "generation_compared_the_wrong_way",
        "fleet/reconcile.py",
        "serving_generation(report) >= _since(state, desired)",
        "serving_generation(report) <= _since(state, desired)",
        "Older files under the same name are not taken for what is desired.",
        ("control/test_reconcile.py",),
    ),
    Mutation(
        "failed_snapshot_sent_again",
        "fleet/reconcile.py",
        "if moved.snapshot == desired.snapshot and moved.generation >= since:",
        "if moved.snapshot == desired.snapshot and moved.generation > since:",
        "A snapshot that failed on a replica is not sent to it again under the same generation.",
        ("control/test_reconcile.py",),
    ),
    Mutation(
        "reset_of_a_skipped_signal_lost",
        "fleet/reconcile.py",
        "if state.reset_all > served:",
        "if state.reset_all >= state.desired.generation > served:",
        "A replica gets the strongest cache policy of all signals since the one it serves.",
        ("control/test_reconcile.py",),
    ),
    Mutation(
        "two_switch_at_once",
        "fleet/reconcile.py",
        "        if _switching(report):\n            return _turn(report)",
        "        if _switching(report):\n            continue",
        "One by one, no replica is let go while another one switches.",
        ("control/test_order.py",),
    ),
    Mutation(
        "minority_is_right",
        "fleet/agree.py",
        "return max(groups, key=len)[0] if groups else None",
        "return min(groups, key=len)[0] if groups else None",
        "Of replicas that disagree the majority is right.",
        ("control/test_agree.py",),
    ),
    Mutation(
        "wrong_weights_agree",
        "fleet/agree.py",
        "if None not in (digest, known) and digest != known:",
        "if known is not None and digest is None:",
        "A replica whose weights are not those the ledger knows is found, also when it is alone.",
        ("control/test_agree.py",),
    ),
    Mutation(
        "room_on_the_cluster_kept",
        "launch/ray_child.py",
        "            _given_up.append(group)\n        if actor",
        "            group = None\n        if actor",
        "Nothing of a server is left on a Ray cluster.",
        ("launch_ray/test_ray_child.py",),
        fast=False,
    ),
)
