"""What always holds between two steps: between the scheduler's sequences, and between these and the KV blocks."""

from samebits.scheduler import BlockManager, Scheduler, Sequence, SequenceStatus


def waiting(scheduler: Scheduler) -> list[Sequence]:
    """All sequences that wait, in order of arrival."""
    return sorted((seq for call in scheduler.calls.values() for seq in call.waiting), key=lambda seq: seq.seq_id)


def check_scheduler(scheduler: Scheduler) -> None:
    queues = [(scheduler.running, SequenceStatus.RUNNING)]
    for name, call in scheduler.calls.items():
        queues.append((call.waiting, SequenceStatus.WAITING))
        assert all(seq.call == name for seq in call.waiting), f"call {name} has another one's sequence"
        assert call.num_running == sum(seq.call == name for seq in scheduler.running), f"call {name} is miscounted"
        assert call.waiting or call.num_running, f"call {name} has ended"
    for queue, status in queues:
        assert all(seq.status is status for seq in queue), f"{status.name} queue holds another status"
        ids = [seq.seq_id for seq in queue]
        assert ids == sorted(set(ids)), f"{status.name} queue is out of order"
    assert scheduler.num_waiting == len(waiting(scheduler))
    assert all(not seq.block_table and not seq.num_cached_tokens for seq in waiting(scheduler)), "a waiter holds KV"
    assert len(scheduler.running) <= scheduler.max_num_seqs, "too many running"
    for seq in scheduler.running:
        have = seq.num_cached_tokens + seq.num_scheduled_tokens
        assert have <= seq.num_tokens, f"{seq} is ahead of its tokens"
        assert len(seq.block_table) >= scheduler.blocks.blocks_for(have), f"{seq} lacks blocks"
    check_blocks(scheduler.blocks, scheduler.running)


def check_blocks(blocks: BlockManager, sequences: list[Sequence]) -> None:
    owners = [0] * blocks.num_blocks
    for source, _ in blocks.copies:
        owners[source] += 1
    copied = owners.copy()
    for seq in sequences:
        assert len(set(seq.block_table)) == len(seq.block_table), f"{seq} holds a block twice"
        for block in seq.block_table:
            owners[block] += 1
        for i, block in enumerate(seq.block_table):
            written = i >= seq.num_cached_tokens // blocks.block_size
            assert not written or blocks.ref_count[block] == 1 + copied[block], f"{seq} writes shared block {block}"
    assert owners == blocks.ref_count, "reference counts differ from the tables"
    assert set(blocks.free_blocks) == {b for b in range(blocks.num_blocks) if owners[b] == 0}, "free list differs"
    assert all(blocks.hash_of[b] == h for h, b in blocks.block_of.items()), "hash index differs"
    assert sum(h is not None for h in blocks.hash_of) == len(blocks.block_of), "hash index differs"
