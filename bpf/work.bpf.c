// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * What flushers do, why, for how long, and what they write.
 *
 * A piece of work is a struct wb_writeback_work. Those that somebody asked for are queued and
 * executed; background and periodic work, and "write all", live on the flusher's own stack and show
 * first when they start. wb_writeback() then makes passes, each from `start` to `written`, in which
 * work->nr_pages falls by what was written. No tracepoint tells the end: it is where the same
 * thread turns to other work, or is through with its BDI (pages_written).
 *
 * See README.md here for keys, values, kernels and cost.
 */
#include "kernel.h"
#include "histogram.h"
#include "inherit.h"
#include "preempt.h"

enum work_exponents { /* 1 ms .. 18 min */
	WORK_FIRST = 20,
	WORK_LAST = 40,
};

/* Rows by enum wb_reason, which has eight; the last one is for all beyond. */
#define REASONS 12

struct work {
	enum work_exponents work_exponents[0];
	__u64 ns;
	__u64 slots[SLOTS(WORK_FIRST, WORK_LAST)];
	__u64 pages;
};

struct bdi {
	char name[64];
	struct work works[REASONS];
};

struct open_work {
	__u64 bdi;
	__u64 begin_ns;
	__u64 work;  /* its address, which other work may have later */
	__s64 pages; /* still to do when the pass began */
	__u32 reason;
	__u32 zero;
};

/* By address: asked for, and not begun. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 8192);
	__type(key, __u64);
	__type(value, struct open_work);
} queued SEC(".maps");

/* By thread id: what a flusher does now. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1024);
	__type(key, __u32);
	__type(value, struct open_work);
} running SEC(".maps");

enum drop {
	DROP_BDIS,    /* work not counted */
	DROP_QUEUED,  /* counted from when it was begun */
	DROP_RUNNING, /* work not counted */
	DROPS,
};

#include "drops.h"
#include "bdi.h"

static __always_inline bool open_work(struct open_work *open, struct bdi_writeback *wb,
				      struct wb_writeback_work *work)
{
	if (!bdi_row(wb->bdi))
		return false;
	open->bdi = wb->bdi->id;
	open->begin_ns = bpf_ktime_get_ns();
	open->work = (__u64)work;
	open->pages = work->nr_pages;
	open->reason = work->reason;
	return true;
}

static __always_inline struct work *row_of(struct open_work *open)
{
	struct bdi *bdi = bpf_map_lookup_elem(&bdis, &open->bdi);
	__u32 reason = open->reason;

	if (!bdi)
		return NULL;
	keep_check(bdi);
	keep_check(reason);
	return &bdi->works[reason < REASONS ? reason : REASONS - 1];
}

/* What this thread did is done. */
static __always_inline void end_work(void)
{
	__u32 tid = bpf_get_current_pid_tgid();
	struct open_work *open = bpf_map_lookup_elem(&running, &tid);
	struct work *work;
	__u64 ns;

	if (!open)
		return;
	ns = ns_between(open->begin_ns, bpf_ktime_get_ns());
	work = row_of(open);
	if (work)
		observe(&work->ns, work->slots, ns, WORK_FIRST, WORK_LAST);
	bpf_map_delete_elem(&running, &tid);
}

static __always_inline void begin_work(struct open_work *open)
{
	__u32 tid = bpf_get_current_pid_tgid();

	if (bpf_map_update_elem(&running, &tid, open, BPF_ANY))
		drop(DROP_RUNNING);
}

static __always_inline bool is(struct open_work *open, struct bdi_writeback *wb,
			       struct wb_writeback_work *work)
{
	return open->work == (__u64)work && open->reason == work->reason &&
	       open->bdi == wb->bdi->id;
}

PROGRAM("tp_btf/writeback_queue", queue)
{
	struct bdi_writeback *wb = (struct bdi_writeback *)ctx[0];
	struct wb_writeback_work *work = (struct wb_writeback_work *)ctx[1];
	struct open_work open = {};

	/* Of a device that is going the kernel drops the work right after this event. */
	if (!(wb->state >> bpf_core_enum_value(enum wb_state, WB_registered) & 1))
		return 0;
	if (open_work(&open, wb, work) && bpf_map_update_elem(&queued, &open.work, &open, BPF_ANY))
		drop(DROP_QUEUED);
	return 0;
}

PROGRAM("tp_btf/writeback_exec", exec)
{
	struct bdi_writeback *wb = (struct bdi_writeback *)ctx[0];
	struct wb_writeback_work *work = (struct wb_writeback_work *)ctx[1];
	struct open_work open = {}, *asked;

	end_work();
	if (!open_work(&open, wb, work))
		return 0;
	asked = bpf_map_lookup_elem(&queued, &open.work);
	if (asked) {
		if (is(asked, wb, work))
			open.begin_ns = asked->begin_ns;
		bpf_map_delete_elem(&queued, &open.work);
	}
	begin_work(&open);
	return 0;
}

PROGRAM("tp_btf/writeback_start", start)
{
	struct bdi_writeback *wb = (struct bdi_writeback *)ctx[0];
	struct wb_writeback_work *work = (struct wb_writeback_work *)ctx[1];
	__u32 tid = bpf_get_current_pid_tgid();
	struct open_work *now = bpf_map_lookup_elem(&running, &tid), open = {};

	if (now && is(now, wb, work)) {
		now->pages = work->nr_pages;
		return 0;
	}
	end_work();
	if (open_work(&open, wb, work))
		begin_work(&open);
	return 0;
}

PROGRAM("tp_btf/writeback_written", written)
{
	struct bdi_writeback *wb = (struct bdi_writeback *)ctx[0];
	struct wb_writeback_work *work = (struct wb_writeback_work *)ctx[1];
	__u32 tid = bpf_get_current_pid_tgid();
	struct open_work *open = bpf_map_lookup_elem(&running, &tid);
	struct work *row;
	__s64 pages;

	if (!open || !is(open, wb, work))
		return 0;
	/* Signed: a pass may write more than was asked for. */
	pages = open->pages - work->nr_pages;
	open->pages = work->nr_pages;
	row = row_of(open);
	if (row && pages > 0)
		add(&row->pages, pages);
	return 0;
}

PROGRAM("tp_btf/writeback_pages_written", pages_written)
{
	end_work();
	return 0;
}

#define ADD_BDI(heir, row) ADD_ROW(&(heir)->works, &(row)->works)

INHERIT(bdis, __u64, struct bdi, ADD_BDI)
