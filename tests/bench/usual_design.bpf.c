// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * What block_io.bpf.c and dirty_throttle.bpf.c are measured against, and no part of the exporter:
 * the design of nearly every tool that counts IO in BPF, written as well as it can be.
 *
 *	requests   a hash map from request pointer to timestamps: insert and delete at each IO
 *		   (biolatency and its relatives in bcc's libbpf-tools)
 *	histogram  a hash map with one key a bucket, and one for the sum: two look-ups for each
 *		   histogram (ebpf_exporter's increment_exp2_histogram)
 *	fields	   BPF_CORE_READ, for the same source serves raw_tp and kprobes, where nothing else
 *		   is allowed
 *
 * It answers the same questions (device time, queue time and size by cgroup, disk and op; sleep by
 * cgroup and BDI), in the same buckets, with the same look at bio->bi_blkg for the owner. It does
 * less: no depth, no errors, no portions, no merges, no disk that takes another's number.
 */
#include "../../bpf/kernel.h"
#include "../../bpf/histogram.h"

#define REQ_OP_MASK 0xff

enum {
	LATENCY_FIRST = 14,
	LATENCY_LAST = 33,
	SIZE_FIRST = 9,
	SIZE_LAST = 30,
	PAUSE_FIRST = 20,
	PAUSE_LAST = 30,
};

enum metric {
	DEVICE_TIME,
	QUEUE_TIME,
	SIZE,
	SLEEP,
};

#define SUM 255 /* in place of a bucket */

struct stamps {
	__u64 arrival_ns;
	__u64 issue_ns;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, struct request *);
	__type(value, struct stamps);
} start SEC(".maps");

struct bucket_key {
	__u64 cgroup;
	__u32 dev; /* disk; the BDI's id for sleep */
	__u8 op;
	__u8 metric;
	__u8 slot;
	__u8 zero;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 262144); /* the bytes of block_io; its keys need nine times these */
	__type(key, struct bucket_key);
	__type(value, __u64);
} buckets SEC(".maps");

/* Ticks a second. */
const volatile __u32 hz = 250;
/* By disk and op alone, as biolatency -D -F and ebpf_exporter's example are. */
const volatile bool per_device;

static __always_inline void increment(const struct bucket_key *key, __u64 n)
{
	__u64 zero = 0, *count = bpf_map_lookup_elem(&buckets, key);

	if (!count) {
		bpf_map_update_elem(&buckets, key, &zero, BPF_NOEXIST);
		count = bpf_map_lookup_elem(&buckets, key);
		if (!count)
			return;
	}
	add(count, n);
}

static __always_inline void count(struct bucket_key *key, enum metric metric, __u64 v, __u32 first,
				  __u32 last)
{
	key->metric = metric;
	key->slot = slot_of(v, first, last);
	increment(key, 1);
	key->slot = SUM;
	increment(key, v);
}

SEC("tp_btf/block_rq_insert")
int usual_insert(__u64 *ctx)
{
	struct request *rq = (void *)ctx[0];
	struct stamps stamps = { .arrival_ns = bpf_ktime_get_ns() };

	bpf_map_update_elem(&start, &rq, &stamps, BPF_ANY);
	return 0;
}

SEC("tp_btf/block_rq_issue")
int usual_issue(__u64 *ctx)
{
	struct request *rq = (void *)ctx[0];
	struct stamps stamps, *inserted;
	__u64 now = bpf_ktime_get_ns();

	inserted = bpf_map_lookup_elem(&start, &rq);
	if (inserted) {
		inserted->issue_ns = now;
		return 0;
	}
	stamps.arrival_ns = now;
	stamps.issue_ns = now;
	bpf_map_update_elem(&start, &rq, &stamps, BPF_ANY);
	return 0;
}

static __always_inline struct gendisk *disk_of(struct request *rq)
{
	struct request___before_5_17 *old = (void *)rq;

	if (bpf_core_field_exists(old->rq_disk))
		return BPF_CORE_READ(old, rq_disk);
	return BPF_CORE_READ(rq, q, disk);
}

SEC("tp_btf/block_rq_complete")
int usual_complete(__u64 *ctx)
{
	struct request *rq = (void *)ctx[0];
	__u32 bytes = ctx[2];
	__u64 now = bpf_ktime_get_ns();
	struct bucket_key key = {};
	struct stamps *stamps;
	struct gendisk *disk;

	stamps = bpf_map_lookup_elem(&start, &rq);
	if (!stamps)
		return 0;
	disk = disk_of(rq);
	key.dev = BPF_CORE_READ(disk, major) << 20 | BPF_CORE_READ(disk, first_minor);
	key.op = BPF_CORE_READ(rq, cmd_flags) & REQ_OP_MASK;
	if (!per_device)
		key.cgroup = BPF_CORE_READ(rq, bio, bi_blkg, blkcg, css.cgroup, kn, id);

	count(&key, DEVICE_TIME, now - stamps->issue_ns, LATENCY_FIRST, LATENCY_LAST);
	count(&key, QUEUE_TIME, stamps->issue_ns - stamps->arrival_ns, LATENCY_FIRST, LATENCY_LAST);
	count(&key, SIZE, bytes, SIZE_FIRST, SIZE_LAST);
	bpf_map_delete_elem(&start, &rq);
	return 0;
}

static __always_inline int throttled(struct bdi_writeback *wb, __s64 pause)
{
	struct bucket_key key = {};

	if (pause <= 0)
		return 0;
	key.cgroup = bpf_get_current_cgroup_id();
	key.dev = BPF_CORE_READ(wb, bdi, id);
	count(&key, SLEEP, pause * 1000000000ULL / hz, PAUSE_FIRST, PAUSE_LAST);
	return 0;
}

/* Up to 6.14: twelve arguments. */
SEC("tp_btf/balance_dirty_pages")
int usual_throttled_values(__u64 *ctx)
{
	return throttled((struct bdi_writeback *)ctx[0], ctx[10]);
}

/* Since 6.16: eight. */
SEC("tp_btf/balance_dirty_pages")
int usual_throttled_control(__u64 *ctx)
{
	return throttled((struct bdi_writeback *)ctx[0], ctx[6]);
}
