"""Mutations of a replica's part in the groups of trainers, and of its receiver."""

from catalogue.mutation import Mutation

TRANSFER = (
    Mutation(
        "a_receiver_outlives_its_deadline",
        "transfer/process.py",
        'self.end(f"the receiver did not {what} within {within_s:g} s")',
        "pass",
        "A receiver that misses a deadline is killed, whatever it waits for.",
        ("transfer/test_gloo_receiver.py::test_a_receiver_that_misses_a_deadline_is_killed",),
    ),
    Mutation(
        "a_tensor_comes_twice",
        "transfer/layout.py",
        "if count > 1 or name in self._placed]",
        "if count > 1]",
        "A pushed tensor comes once in an update.",
        ("transfer/test_update_layout.py",),
    ),
    Mutation(
        "an_update_lacks_a_tensor",
        "transfer/layout.py",
        "if name not in self._placed and name not in self._optional",
        "if name not in self._placed and not self._placed",
        "A push that lacks a tensor makes no snapshot.",
        ("transfer/test_update_layout.py",),
    ),
    Mutation(
        "an_order_for_another_boot_counts",
        "replica/transfer.py",
        "if boot != meant:",
        "if not meant:",
        "No boot of a replica takes part in the group of another one.",
        ("replica/test_replica_transfer.py",),
    ),
    Mutation(
        "silence_is_a_living_trainer",
        "replica/transfer.py",
        "missed = seen is not TrainerState.ALIVE and",
        "missed = seen is TrainerState.GONE and",
        "A group does not outlive its trainer, whatever holds the trainer's port.",
        ("replica/test_replica_transfer.py",),
    ),
    Mutation(
        "whatever_listens_is_the_trainer",
        "transfer/trainer_store.py",
        "        self._key = key\n",
        "",
        "A part in place does not outlive its trainer, whatever holds the trainer's port.",
        ("transfer/test_in_place.py", "transfer/test_trainer_store.py"),
    ),
    Mutation(
        "an_order_ends_with_its_caller",
        "replica/transfer.py",
        "return await asyncio.shield(task)",
        "return await task",
        "An order of a push is carried out, also if its gateway is gone.",
        ("replica/test_replica_transfer.py",),
    ),
    Mutation(
        "a_group_outlives_its_boot",
        "replica/replica.py",
        'self.transfers.end_group("the replica\'s engine ended")',
        "pass",
        "A receiver ends with the boot that joined its group.",
        ("replica/test_replica_transfer.py",),
    ),
    Mutation(
        "a_forgotten_update_stays_open",
        "replica/transfer.py",
        "if self.update == update:",
        "if self.update is None:",
        "An update of a trainer that died is dropped in time.",
        ("replica/test_replica_transfer.py",),
    ),
)
