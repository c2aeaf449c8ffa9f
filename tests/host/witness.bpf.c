// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * A second look at the same events, by raw tracepoints, probe reads and one plain counter each,
 * that shares nothing with bpf/: counts what the kernel showed to anybody at all.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

char LICENSE[] SEC("license") = "Dual BSD/GPL";

struct gendisk {
	int major;
	int first_minor;
} __attribute__((preserve_access_index));

struct request_queue {
	struct gendisk *disk;
} __attribute__((preserve_access_index));

struct request {
	struct request_queue *q;
	unsigned int cmd_flags;
} __attribute__((preserve_access_index));

struct backing_dev_info {
	char dev_name[64];
} __attribute__((preserve_access_index));

struct bdi_writeback {
	struct backing_dev_info *bdi;
} __attribute__((preserve_access_index));

enum wb_reason {
	WB_REASON_BACKGROUND,
};

struct wb_writeback_work {
	enum wb_reason reason;
} __attribute__((preserve_access_index));

/*
 * what: 0 issue, 1 requeue, 2 completion with data or of a flush, 3 its bytes; 4 pauses, 5 ticks;
 * 6 queued writeback work; 7 waits for pages
 */
struct key {
	__u64 what;
	__u64 major; /* or the BDI's name, its first 8 bytes */
	__u64 minor; /* or the cgroup's id; or why the work was queued */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__type(key, struct key);
	__type(value, __u64);
} seen SEC(".maps");

static void count(struct key key, __u64 n)
{
	__u64 zero = 0, *value;

	bpf_map_update_elem(&seen, &key, &zero, BPF_NOEXIST);
	value = bpf_map_lookup_elem(&seen, &key);
	if (value)
		__sync_fetch_and_add(value, n);
}

static struct key of(struct request *rq, __u64 what)
{
	struct key key = { .what = what };

	key.major = BPF_CORE_READ(rq, q, disk, major);
	key.minor = BPF_CORE_READ(rq, q, disk, first_minor);
	return key;
}

SEC("raw_tp/block_rq_issue")
int issue(struct bpf_raw_tracepoint_args *ctx)
{
	count(of((struct request *)ctx->args[0], 0), 1);
	return 0;
}

SEC("raw_tp/block_rq_requeue")
int requeue(struct bpf_raw_tracepoint_args *ctx)
{
	count(of((struct request *)ctx->args[0], 1), 1);
	return 0;
}

SEC("raw_tp/block_rq_complete")
int complete(struct bpf_raw_tracepoint_args *ctx)
{
	struct request *rq = (struct request *)ctx->args[0];
	__u32 bytes = ctx->args[2];

	/* The second completion of a flush sequence has neither data nor is a flush. */
	if (!bytes && (BPF_CORE_READ(rq, cmd_flags) & 0xff) != 2)
		return 0;
	count(of(rq, 2), 1);
	count(of(rq, 3), bytes);
	return 0;
}

static int throttled(struct bdi_writeback *wb, __s64 pause)
{
	struct key key = { .what = 4, .minor = bpf_get_current_cgroup_id() };

	if (pause <= 0)
		return 0;
	bpf_probe_read_kernel_str(&key.major, 8, BPF_CORE_READ(wb, bdi)->dev_name);
	count(key, 1);
	key.what = 5;
	count(key, pause);
	return 0;
}

SEC("raw_tp/balance_dirty_pages")
int throttle_12(struct bpf_raw_tracepoint_args *ctx)
{
	return throttled((struct bdi_writeback *)ctx->args[0], ctx->args[10]);
}

SEC("raw_tp/balance_dirty_pages")
int throttle_8(struct bpf_raw_tracepoint_args *ctx)
{
	return throttled((struct bdi_writeback *)ctx->args[0], ctx->args[6]);
}

SEC("raw_tp/writeback_queue")
int work(struct bpf_raw_tracepoint_args *ctx)
{
	struct bdi_writeback *wb = (struct bdi_writeback *)ctx->args[0];
	struct key key = { .what = 6 };

	bpf_probe_read_kernel_str(&key.major, 8, BPF_CORE_READ(wb, bdi)->dev_name);
	key.minor = BPF_CORE_READ((struct wb_writeback_work *)ctx->args[1], reason);
	count(key, 1);
	return 0;
}

SEC("raw_tp/folio_wait_writeback")
int page_wait(struct bpf_raw_tracepoint_args *ctx)
{
	struct key key = { .what = 7, .minor = bpf_get_current_cgroup_id() };

	count(key, 1);
	return 0;
}
