"""Which replica of Ray Serve gets a request. Ray copies this file's code into its own processes."""

from __future__ import annotations

import hashlib

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from restorekv.serve.ray import options


class DocumentRouter(RequestRouter):
    """A router that sends all requests about a document to one replica, which then holds it.

    If that replica is full, they go to the next one. The order of replicas follows from the
    document and their names alone (rendezvous hashing). So it is the same in every process, and
    when a replica comes or goes, most documents stay where they are.
    """

    # A replica that is computing is slow to report how many requests wait there.
    queue_len_response_deadline_s = 5.0
    max_queue_len_response_deadline_s = 20.0

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Note which replicas run."""
        super().update_replicas(replicas)
        options.note_replicas(each.replica_id.unique_id for each in replicas)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the order in which they are tried."""
        key = pending_request.metadata.multiplexed_model_id if pending_request else ""
        if pending_request:
            pending_request.routing_context.should_backoff = True  # when all are full

        def hash_for_document(replica: RunningReplica) -> bytes:
            return hashlib.sha256(f"{key} {replica.replica_id.unique_id}".encode()).digest()

        return [[replica] for replica in sorted(candidate_replicas, key=hash_for_document)]
