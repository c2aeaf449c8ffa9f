// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Who a disk serves, and how: device time, queue time, size and errors of requests by
 * (cgroup, disk, op), and the disk's depth.
 *
 *	insert    stamps arrival where the kernel itself does not; attached once a disk needs it
 *	issue     remembers the request: owner, disk, op, arrival, now
 *	requeue   takes it off the device, keeps its arrival
 *	complete  counts each portion; the last one makes the observation
 *	merge     forgets a request that became part of another
 *
 * See README.md here for keys, values, kernels and cost.
 */
#include "kernel.h"
#include "histogram.h"
#include "inherit.h"
#include "preempt.h"

/* Operations as they are exported. */
enum io_op {
	IO_READ,
	IO_WRITE,
	IO_DISCARD,
	IO_FLUSH,
	IO_OTHER, /* write zeroes, secure erase, zone management: no data moves */
	IO_OPS,
};

/* Numbers that no kernel changed (include/linux/blk_types.h). */
#define REQ_OP_MASK 0xff
#define REQ_OP_READ 0
#define REQ_OP_WRITE 1
#define REQ_OP_FLUSH 2
#define REQ_OP_DISCARD 3
/*
 * From here on passthrough commands (SCSI_IN = 32 on 5.10, DRV_IN = 34): no IO of a file system or
 * block device, absent from diskstats, and some (NVMe's event request) stay open for days.
 */
#define REQ_OP_PASSTHROUGH 32

enum io_latency_exponents { /* 16 us .. 8.6 s */
	IO_LATENCY_FIRST = 14,
	IO_LATENCY_LAST = 33,
};

enum io_size_exponents { /* 512 B .. 1 GiB */
	IO_SIZE_FIRST = 9,
	IO_SIZE_LAST = 30,
};

enum io_depth_exponents { /* 1 .. 1024 */
	IO_DEPTH_FIRST = 0,
	IO_DEPTH_LAST = 10,
};

struct io_key {
	__u64 cgroup; /* id; 0 where the IO has no owner */
	__u32 disk;   /* index in disks */
	enum io_op op;
};

/* All that is known of one (cgroup, disk, op): one lookup an IO, and no sum without its slots. */
struct io_histograms {
	enum io_latency_exponents latency_exponents[0];
	enum io_size_exponents size_exponents[0];
	__u64 device_ns;
	__u64 device_slots[SLOTS(IO_LATENCY_FIRST, IO_LATENCY_LAST)];
	__u64 queue_ns;
	__u64 queue_slots[SLOTS(IO_LATENCY_FIRST, IO_LATENCY_LAST)];
	__u64 size_bytes;
	__u64 size_slots[SLOTS(IO_SIZE_FIRST, IO_SIZE_LAST)];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 32768);
	__type(key, struct io_key);
	__type(value, struct io_histograms);
} block_io SEC(".maps");

struct io_error_key {
	__u64 cgroup;
	__u32 disk;
	enum io_op op;
	__s32 status; /* BLK_STS_* where positive, -errno (before 5.18) where negative */
	__u32 zero;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, struct io_error_key);
	__type(value, __u64);
} block_io_errors SEC(".maps");

/*
 * Disks. An index into an array, found by hashing the gendisk, costs 5 ns where a hash map costs
 * 40; and since a new disk under an old dev_t has another gendisk, a hot-plugged disk never
 * inherits the counts of its predecessor. The two hash maps serve the first IO of a disk (who
 * takes which index, decided atomically on every kernel) and disks whose hashes collide.
 */
#define DISKS_LOG2 10
#define DISKS (1 << DISKS_LOG2)
#define DISK_PROBES 16

struct disk_id {
	__u64 gendisk;
	__u64 dev;
};

struct io_depth {
	enum io_depth_exponents exponents[0];
	__u64 sum;
	__u64 slots[SLOTS(IO_DEPTH_FIRST, IO_DEPTH_LAST)];
};

struct disk {
	struct disk_id id;
	__u64 since_ns; /* of its first IO: of two under one name the later one is there */
	__s64 inflight;
	struct io_depth depth;
	/* What found no room in block_io: attributed to no cgroup, but not lost. */
	struct io_histograms other[IO_OPS];
	char name[32];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, DISKS);
	__type(key, __u32);
	__type(value, struct disk);
} disks SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, DISKS);
	__type(key, struct disk_id);
	__type(value, __u32);
} disk_index SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, DISKS);
	__type(key, __u32);
	__type(value, struct disk_id);
} disk_owner SEC(".maps");

/*
 * Requests in flight. A slot is found by the request's address (its memory is the tag's, used again
 * and again) and belongs to the request whose address it holds; one that is taken sends the request
 * to a hash map. Claiming a slot needs cmpxchg (5.12); without, all go to the hash map.
 *
 * Requests of a queue lie side by side, at least 256 bytes apart (sizeof(struct request), and the
 * driver's part, rounded up to cache lines), and so do their slots: a hash that scattered them over
 * as many pages missed the TLB at each event, 30 of 300 ns an IO and 100 of 500 with 16 cgroups.
 */
#ifndef REQUESTS_LOG2 /* a test has requests collide */
#define REQUESTS_LOG2 14
#endif
#define SPILLED 16384
#define REQUEST_SIZE_LOG2 8

struct request_state {
	__u64 rq; /* 0: free */
	__u64 arrival_ns;
	__u64 issue_ns; /* 0: not with the driver now */
	__u64 cgroup;
	__u64 bytes; /* completed so far */
	__u32 disk;
	enum io_op op;
	bool spilled;	/* lives in requests_spilled */
	__u32 overflow; /* of the slot: requests that found it taken and were spilled */
	__u8 pad[8];	/* a cache line */
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1 << REQUESTS_LOG2);
	__type(key, __u32);
	__type(value, struct request_state);
} requests SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, SPILLED);
	__type(key, __u64);
	__type(value, struct request_state);
} requests_spilled SEC(".maps");

enum drop {
	DROP_BLOCK_IO,	       /* counted in disk.other instead */
	DROP_BLOCK_IO_ERRORS,  /* counted in histograms, error not */
	DROP_DISKS,	       /* request not counted */
	DROP_REQUESTS_SPILLED, /* request not counted */
	DROP_REQUESTS,	       /* ended without an event that we saw; not counted */
	DROPS,
};

#include "drops.h"

/* 1 where the tracepoints' first argument is the request_queue (before 5.11 and 5.10.137). */
const volatile bool queue_argument;

/* REQ_OP_ZONE_APPEND: 13, since 6.0 7, in an enum that was renamed as well. */
const volatile __u32 zone_append_op = 7;

static const struct io_histograms no_io;
static const struct disk no_disk;

/*
 * Of the low half only: the verifier forbids arithmetic on kernel pointers, but lets a 32 bit move
 * of one become a number.
 */
static __always_inline __u32 low_half(const void *pointer)
{
	__u32 low;

	asm volatile("%0 = %1" : "=w"(low) : "w"((__u32)(__u64)pointer));
	return low;
}

static __always_inline __u32 hash_pointer(const void *pointer, __u32 bits)
{
	return low_half(pointer) * 0x61C88647 >> (32 - bits); /* as hash_32() */
}

/* The first IO of a disk, and each IO of one whose place was taken. */
static __noinline __u32 find_disk(struct gendisk *gd, __u64 dev)
{
	struct disk_id id = { .gendisk = (__u64)gd, .dev = dev };
	__u32 start = hash_pointer(gd, DISKS_LOG2), index;
	struct disk *disk;
	__u32 *known;
	int i;

	known = bpf_map_lookup_elem(&disk_index, &id);
	if (known)
		return *known;
	for (i = 0; i < DISK_PROBES; i++) {
		index = (start + i) & (DISKS - 1);
		if (!bpf_map_update_elem(&disk_owner, &index, &id, BPF_NOEXIST))
			break;
	}
	if (i == DISK_PROBES)
		return DISKS;
	disk = bpf_map_lookup_elem(&disks, &index);
	if (!disk)
		return DISKS;
	/* All that others may see or change, before they can find it. */
	bpf_probe_read_kernel_str(disk->name, sizeof(disk->name), gd->disk_name);
	disk->since_ns = bpf_ktime_get_ns();
	disk->inflight = 0;
	if (bpf_map_update_elem(&disk_index, &id, &index, BPF_NOEXIST)) {
		/* Another CPU was first with the same disk. */
		bpf_map_delete_elem(&disk_owner, &index);
		known = bpf_map_lookup_elem(&disk_index, &id);
		return known ? *known : DISKS;
	}
	disk->id.dev = dev;
	disk->id.gendisk = (__u64)gd;
	return index;
}

static __always_inline struct disk *disk_of(struct gendisk *gd, __u32 *index)
{
	__u64 dev = (__u64)gd->major << 32 | (__u32)gd->first_minor;
	struct disk *disk;

	*index = hash_pointer(gd, DISKS_LOG2);
	disk = bpf_map_lookup_elem(&disks, index);
	if (disk && disk->id.gendisk == (__u64)gd && disk->id.dev == dev)
		return disk;
	*index = find_disk(gd, dev);
	return bpf_map_lookup_elem(&disks, index);
}

static __always_inline struct request_state *slot_of_request(struct request *rq)
{
	__u32 index = low_half(rq) >> REQUEST_SIZE_LOG2 & ((1 << REQUESTS_LOG2) - 1);

	return bpf_map_lookup_elem(&requests, &index);
}

static __always_inline struct request_state *find_request(struct request *rq, bool slots)
{
	struct request_state *slot;

	if (slots) {
		slot = slot_of_request(rq);
		if (slot && slot->rq == (__u64)rq)
			return slot;
		if (slot && !slot->overflow)
			return NULL;
	}
	return bpf_map_lookup_elem(&requests_spilled, &rq);
}

static __always_inline void count_overflow(struct request *rq, int n)
{
	struct request_state *slot = slot_of_request(rq);

	if (slot)
		__atomic_fetch_add(&slot->overflow, n, __ATOMIC_RELAXED);
}

static __always_inline struct request_state *spill_request(struct request *rq, bool slots)
{
	struct request_state fresh = { .rq = (__u64)rq, .spilled = true };

	if (slots)
		count_overflow(rq, 1);
	if (bpf_map_update_elem(&requests_spilled, &rq, &fresh, BPF_ANY)) {
		if (slots)
			count_overflow(rq, -1);
		drop(DROP_REQUESTS_SPILLED);
		return NULL;
	}
	return bpf_map_lookup_elem(&requests_spilled, &rq);
}

/* The request's place; if it had none, a new one, with what a slot's last user left in it. */
static __always_inline struct request_state *enter_request(struct request *rq, bool slots,
							   bool *is_new)
{
	struct request_state *state = NULL;
	__u64 owner;

	*is_new = false;
	if (slots) {
		state = slot_of_request(rq);
		/* Nobody was spilled from here, nor was it: find and claim in one step. */
		if (state && !state->overflow) {
			owner = __sync_val_compare_and_swap(&state->rq, 0, (__u64)rq);
			*is_new = !owner;
			if (!owner || owner == (__u64)rq)
				return state;
			*is_new = true;
			return spill_request(rq, slots);
		}
	}
	state = find_request(rq, slots);
	if (state)
		return state;
	*is_new = true;
	if (slots) {
		state = slot_of_request(rq);
		if (state && !__sync_val_compare_and_swap(&state->rq, 0, (__u64)rq))
			return state;
	}
	return spill_request(rq, slots);
}

/*
 * Gives the place back; false where another CPU did it before. All that is needed of the state was
 * read before: the atomic is a full barrier, after it the place may be another request's.
 */
static __always_inline bool release_request(struct request_state *state, struct request *rq,
					    bool slots)
{
	if (slots && !state->spilled)
		return __sync_val_compare_and_swap(&state->rq, (__u64)rq, 0) == (__u64)rq;
	if (bpf_map_delete_elem(&requests_spilled, &rq))
		return false;
	if (slots)
		count_overflow(rq, -1);
	return true;
}

static __always_inline void leave_disk(__u32 index)
{
	struct disk *disk = bpf_map_lookup_elem(&disks, &index);

	if (disk)
		__atomic_fetch_add(&disk->inflight, -1, __ATOMIC_RELAXED);
}

static __always_inline __u64 owner_of(struct request *rq)
{
	struct blkcg_gq *blkg;
	struct bio *bio = rq->bio;

	if (!bio) /* flush */
		return 0;
	/* Bios of different owners are never merged: the first one names the request's. */
	blkg = bio->bi_blkg;
	return blkg ? cgroup_id(blkg->blkcg->css.cgroup) : 0;
}

static __always_inline enum io_op op_of(struct request *rq)
{
	__u32 op = rq->cmd_flags & REQ_OP_MASK;

	if (op == REQ_OP_READ)
		return IO_READ;
	if (op == REQ_OP_WRITE || op == zone_append_op)
		return IO_WRITE;
	if (op == REQ_OP_DISCARD)
		return IO_DISCARD;
	if (op == REQ_OP_FLUSH)
		return IO_FLUSH;
	return IO_OTHER;
}

static __always_inline bool is_passthrough(struct request *rq)
{
	return (rq->cmd_flags & REQ_OP_MASK) >= REQ_OP_PASSTHROUGH;
}

static __always_inline void count_error(__u64 cgroup, __u32 disk, enum io_op op, int status)
{
	struct io_error_key key = { .cgroup = cgroup, .disk = disk, .op = op, .status = status };
	__u64 one = 1, *count;

	count = bpf_map_lookup_elem(&block_io_errors, &key);
	if (!count) {
		if (!bpf_map_update_elem(&block_io_errors, &key, &one, BPF_NOEXIST))
			return;
		count = bpf_map_lookup_elem(&block_io_errors, &key);
	}
	if (count)
		add(count, 1);
	else
		drop(DROP_BLOCK_IO_ERRORS);
}

static __always_inline struct io_histograms *histograms_of(struct io_key *key)
{
	struct io_histograms *io = bpf_map_lookup_elem(&block_io, key);
	struct disk *disk;
	__u32 op;

	if (io)
		return io;
	bpf_map_update_elem(&block_io, key, &no_io, BPF_NOEXIST);
	io = bpf_map_lookup_elem(&block_io, key);
	if (io)
		return io;
	drop(DROP_BLOCK_IO);
	disk = bpf_map_lookup_elem(&disks, &key->disk);
	op = key->op;
	keep_check(op);
	if (!disk || op >= IO_OPS)
		return NULL;
	keep_check(disk);
	return &disk->other[op];
}

/*
 * Arrival in the block layer. The kernel stamps it itself, at the request's allocation, where
 * iostats, a scheduler or a user of statistics is on, which is nearly always; and insert is skipped
 * on direct dispatch. So only what the kernel did not stamp is stamped by `insert`, and what was
 * not inserted either has never queued.
 */
static __always_inline __u64 arrival(struct request *rq, __u64 now)
{
	__u64 start_ns = rq->start_time_ns;

	return start_ns ? start_ns : now;
}

static __always_inline int insert(struct request *rq, bool slots)
{
	struct request_state *state;
	bool is_new;

	if (rq->start_time_ns || is_passthrough(rq))
		return 0;
	state = enter_request(rq, slots, &is_new);
	if (!state)
		return 0;
	if (!is_new) {
		if (!state->issue_ns) /* requeued, and inserted again */
			return 0;
		leave_disk(state->disk);
		drop(DROP_REQUESTS);
	}
	state->issue_ns = 0;
	state->arrival_ns = bpf_ktime_get_ns();
	state->bytes = 0;
	return 0;
}

static __always_inline int issue(struct request *rq, bool slots)
{
	struct gendisk *gd = request_disk(rq);
	struct request_state *state;
	struct disk *disk;
	__s64 depth;
	__u64 now;
	__u32 index;
	bool is_new;

	if (is_passthrough(rq) || !gd)
		return 0;
	now = bpf_ktime_get_ns();
	disk = disk_of(gd, &index);
	if (!disk) {
		drop(DROP_DISKS);
		return 0;
	}
	state = enter_request(rq, slots, &is_new);
	if (!state)
		return 0;
	if (!is_new && state->issue_ns) {
		/* Its memory is in use again, and we never saw the end of the last use. */
		leave_disk(state->disk);
		drop(DROP_REQUESTS);
		is_new = true;
	}
	if (is_new) { /* else inserted, or requeued: its arrival and portions stand */
		state->arrival_ns = arrival(rq, now);
		state->bytes = 0;
	}
	state->issue_ns = now;
	state->cgroup = owner_of(rq);
	state->disk = index;
	state->op = op_of(rq);

	if (slots) {
		depth = __sync_fetch_and_add(&disk->inflight, 1) + 1;
	} else { /* 5.10 cannot add and fetch */
		__atomic_fetch_add(&disk->inflight, 1, __ATOMIC_RELAXED);
		depth = disk->inflight;
	}
	if (depth < 1) /* a request that hung in a forgotten disk ended in this one's place */
		depth = 1;
	observe(&disk->depth.sum, disk->depth.slots, depth, IO_DEPTH_FIRST, IO_DEPTH_LAST);
	return 0;
}

static __always_inline int requeue(struct request *rq, bool slots)
{
	struct request_state *state = find_request(rq, slots);

	if (!state || !state->issue_ns)
		return 0;
	leave_disk(state->disk);
	state->issue_ns = 0;
	return 0;
}

/* An end without a completion: the request's bios went on in another request. */
static __always_inline int merge(struct request *rq, bool slots)
{
	struct request_state *state = find_request(rq, slots);

	if (state && !state->issue_ns)
		release_request(state, rq, slots);
	return 0;
}

/*
 * An error of a request that is not with the driver: it failed before it was ever issued, or was
 * issued before we attached.
 */
static __always_inline void count_foreign_error(struct request *rq, int status)
{
	struct gendisk *gd = request_disk(rq);
	__u32 index;

	if (gd && rq->bio && !is_passthrough(rq) && disk_of(gd, &index))
		count_error(owner_of(rq), index, op_of(rq), status);
}

static __always_inline int complete(struct request *rq, int status, __u32 bytes, bool slots)
{
	struct request_state *state = find_request(rq, slots);
	__u64 now, size, device_ns, queue_ns;
	struct io_histograms *io;
	struct io_key key;

	/* Not ours, or the second completion of a FUA write, when its flush is done. */
	if (!state || !state->issue_ns) {
		if (state) {
			if (state->bytes) /* requeued after a portion, and given up */
				drop(DROP_REQUESTS);
			release_request(state, rq, slots);
		}
		/* With no bytes it is the end of a flush sequence, whose error is counted already.
		 */
		if (status && bytes)
			count_foreign_error(rq, status);
		return 0;
	}

	now = bpf_ktime_get_ns();
	key.cgroup = state->cgroup;
	key.disk = state->disk;
	key.op = state->op;
	size = state->bytes + bytes;
	if (status)
		count_error(key.cgroup, key.disk, key.op, status);
	if (bytes < rq->__data_len) { /* a portion; the rest is still with the driver */
		state->bytes = size;
		return 0;
	}
	device_ns = ns_between(state->issue_ns, now);
	queue_ns = ns_between(state->arrival_ns, state->issue_ns);
	if (!release_request(state, rq, slots))
		return 0;
	leave_disk(key.disk);

	io = histograms_of(&key);
	if (!io)
		return 0;
	observe(&io->device_ns, io->device_slots, device_ns, IO_LATENCY_FIRST, IO_LATENCY_LAST);
	observe(&io->queue_ns, io->queue_slots, queue_ns, IO_LATENCY_FIRST, IO_LATENCY_LAST);
	observe(&io->size_bytes, io->size_slots, size, IO_SIZE_FIRST, IO_SIZE_LAST);
	return 0;
}

static __always_inline struct request *request_argument(__u64 *ctx)
{
	__u64 rq;

	if (queue_argument) {
		rq = ctx[1];
		/* Two loads, not one at a computed offset: the verifier refuses that. */
		asm volatile("" : "+r"(rq));
	} else {
		rq = ctx[0];
	}
	return (struct request *)rq;
}

/* Each program twice: with slots where the kernel has cmpxchg (5.12), with the hash map alone. */
#define PROGRAMS(suffix, slots)                                                   \
	PROGRAM("tp_btf/block_rq_insert", insert_##suffix)                        \
	{                                                                         \
		return insert(request_argument(ctx), slots);                      \
	}                                                                         \
	PROGRAM("tp_btf/block_rq_issue", issue_##suffix)                          \
	{                                                                         \
		return issue(request_argument(ctx), slots);                       \
	}                                                                         \
	PROGRAM("tp_btf/block_rq_requeue", requeue_##suffix)                      \
	{                                                                         \
		return requeue(request_argument(ctx), slots);                     \
	}                                                                         \
	PROGRAM("tp_btf/block_rq_merge", merge_##suffix)                          \
	{                                                                         \
		return merge(request_argument(ctx), slots);                       \
	}                                                                         \
	PROGRAM("tp_btf/block_rq_complete", complete_##suffix)                    \
	{                                                                         \
		return complete((struct request *)ctx[0], ctx[1], ctx[2], slots); \
	}

PROGRAMS(slots, true)
PROGRAMS(hash, false)

INHERIT(block_io, struct io_key, struct io_histograms, ADD_ROW)
INHERIT(block_io_errors, struct io_error_key, __u64, ADD_ROW)

/*
 * Forgets a disk, by its index, and gives what is not in block_io to its heir, by index, or DISKS
 * for none. In one step, as inherit.h says: an index that leads to an empty place would count for a
 * disk without a name.
 */
SEC("raw_tp")
int drop_disk(struct bpf_raw_tracepoint_args *ctx)
{
	__u32 index = ctx->args[0], heirs = ctx->args[1];
	struct disk *disk = bpf_map_lookup_elem(&disks, &index);
	struct disk *heir = bpf_map_lookup_elem(&disks, &heirs);
	struct disk_id id;

	if (!disk)
		return 0;
	keep_check(disk);
	id = disk->id;
	bpf_map_delete_elem(&disk_index, &id);
	if (heir) {
		keep_check(heir);
		ADD_ROW(&heir->depth, &disk->depth);
#pragma clang loop unroll(full)
		for (int op = 0; op < IO_OPS; op++)
			ADD_ROW(&heir->other[op], &disk->other[op]);
	}
	bpf_map_update_elem(&disks, &index, &no_disk, BPF_ANY);
	bpf_map_delete_elem(&disk_owner, &index);
	return 1;
}
