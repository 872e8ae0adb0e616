"""Mutations of the Tinker API and its trainer."""

from catalogue.mutation import Mutation

TINKER = (
    Mutation(
        "future_answered_twice",
        "midstream_tinker/futures.py",
        "if self.outcome is not None:\n            return",
        "if self.outcome is not None and self.fetched:\n            return",
        "A future ends once, and what comes later is dropped.",
        ("tinker/test_tinker_futures.py",),
    ),
    Mutation(
        "future_of_another_tenant",
        "midstream_tinker/futures.py",
        "if future is None or future.tenant != tenant:",
        "if future is None:",
        "A future is known to the tenant alone that made it.",
        ("tinker/test_tinker_futures.py",),
    ),
    Mutation(
        "lost_submission_sampled_twice",
        "midstream_tinker/sampling.py",
        "future = self._futures.new(tenant, KIND, mark)",
        "future = self._futures.new(tenant, KIND)",
        "A submission that comes again, as its answer was lost, is not sampled again.",
        ("tinker/test_tinker_sampling_service.py",),
    ),
    Mutation(
        "logprobs_of_the_raw_model",
        "midstream_tinker/samples.py",
        "logprobs = [entry.sampling_logprob for entry in entries]",
        "logprobs = [entry.logprob for entry in entries]",
        "A sample's log-probabilities are of the distribution its tokens were drawn from.",
        ("tinker/test_tinker_sampling_mapping.py",),
    ),
    Mutation(
        "training_step_out_of_turn",
        "midstream_tinker/turns.py",
        "            if self._next in self._waiting:\n                return self._pop(self._next)",
        "            if self._waiting:\n                return self._pop(min(self._waiting))",
        "A training request is carried out only after all those before it.",
        ("tinker/test_tinker_training_turns.py",),
    ),
    Mutation(
        "checkpoint_known_before_its_files",
        "midstream_tinker/training.py",
        "            written: m.Written = await self._loaded.call(\n"
        "                model.row.id, m.SaveState(model.row.id, str(directory))\n"
        "            )\n",
        "            early = checkpoint_row(model.row, uri, self._clock(), 0, body.user_metadata)\n"
        "            self._store.add_checkpoint(tenant, early)\n"
        "            written = await self._loaded.call(model.row.id, m.SaveState(model.row.id, str(directory)))\n",
        "A checkpoint is known only after its files are whole.",
        ("tinker/test_tinker_training.py",),
    ),
    Mutation(
        "replayed_route_shifted",
        "client/replay.py",
        "forced = self._forced[:, layer]",
        "forced = self._forced[:, layer].roll(1, 0)",
        "A replayed route is used at the position it was recorded at.",
        ("tinker/test_trainer_routes.py",),
    ),
    Mutation(
        "saved_adapter_kept_as_whole_weights",
        "midstream_tinker/samplers.py",
        "            if exported.adapter:\n                await self._publish.put_adapter(identity, directory)",
        "            if not exported.adapter:\n                await self._publish.put_adapter(identity, directory)",
        "A saved path of a LoRA run is an adapter, beside all others.",
        ("tinker/test_tinker_samplers.py",),
    ),
    Mutation(
        "adapter_in_use_ended",
        "midstream_tinker/adapters.py",
        "            while held.users:\n",
        "            while False:\n",
        "An adapter that a sample uses is not ended.",
        ("tinker/test_tinker_adapters.py",),
    ),
    Mutation(
        "ended_policy_told_again",
        "fleet/replica_set.py",
        "        if self.ending:\n            # A replica",
        "        if False:\n            # A replica",
        "A replica that has forgotten a policy is not told of it again.",
        ("control/test_policy_ends.py",),
    ),
    Mutation(
        "adapter_that_could_not_be_ended_is_forgotten",
        "midstream_tinker/adapters.py",
        "            self._listed = False\n            logger",
        "            logger",
        "A policy that could not be ended counts again once the policies are listed anew.",
        ("tinker/test_tinker_adapters.py",),
    ),
)
