// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * How long tasks wait for pages that are under writeback.
 *
 * folio_wait_writeback() and its killable sister fire the tracepoint when they find a page under
 * writeback, and then wait for its bit: in folio_wait_bit(), which nobody calls without waiting, so
 * that its fexit costs what is no wait nothing. Where fexit is refused, the scheduler tells when
 * the task runs again.
 *
 * See README.md here for keys, values, kernels and cost.
 */
#include "cgroup.h"
#include "histogram.h"
#include "inherit.h"
#include "preempt.h"

enum page_wait_exponents { /* 65 us .. 137 s */
	PAGE_WAIT_FIRST = 16,
	PAGE_WAIT_LAST = 37,
};

struct page_wait {
	enum page_wait_exponents exponents[0];
	__u64 ns;
	__u64 slots[SLOTS(PAGE_WAIT_FIRST, PAGE_WAIT_LAST)];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, __u64); /* cgroup */
	__type(value, struct page_wait);
} page_wait SEC(".maps");

struct page_waiter {
	__u64 cgroup;
	__u64 begin_ns;
	__u64 asleep; /* seen by the scheduler */
};

/* By thread id. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, __u32);
	__type(value, struct page_waiter);
} page_waiters SEC(".maps");

enum drop {
	DROP_PAGE_WAIT,	   /* counted for OTHER_CGROUP */
	DROP_PAGE_WAITERS, /* wait not counted */
	DROPS,
};

#include "drops.h"

/* Entries in page_waiters, so that the scheduler's events cost little where there are none. */
__u64 waiting;

static const struct page_wait no_wait;

static __always_inline void count_wait(__u64 cgroup, __u64 ns)
{
	struct page_wait *row;
	bool full;

	row = cgroup_row(&page_wait, &cgroup, &cgroup, &no_wait, &full);
	if (full)
		drop(DROP_PAGE_WAIT);
	if (row)
		observe(&row->ns, row->slots, ns, PAGE_WAIT_FIRST, PAGE_WAIT_LAST);
}

static __always_inline void end_wait(__u32 tid, struct page_waiter *waiter, __u64 end_ns)
{
	count_wait(waiter->cgroup, ns_between(waiter->begin_ns, end_ns));
	if (!bpf_map_delete_elem(&page_waiters, &tid))
		add(&waiting, -1);
}

static __always_inline int wait_begins(void)
{
	__u32 tid = bpf_get_current_pid_tgid();
	struct page_waiter *waiter = bpf_map_lookup_elem(&page_waiters, &tid), fresh = {};

	/* Without fexit: the wait before was over before the task slept. */
	if (waiter)
		end_wait(tid, waiter, waiter->begin_ns);
	fresh.cgroup = current_cgroup();
	fresh.begin_ns = bpf_ktime_get_ns();
	if (bpf_map_update_elem(&page_waiters, &tid, &fresh, BPF_NOEXIST))
		drop(DROP_PAGE_WAITERS);
	else
		add(&waiting, 1);
	return 0;
}

/* Since 5.16. */
PROGRAM("tp_btf/folio_wait_writeback", folio_wait_begins)
{
	return wait_begins();
}

/* Before. */
PROGRAM("tp_btf/wait_on_page_writeback", page_wait_begins)
{
	return wait_begins();
}

static __always_inline int wait_ends(void)
{
	__u32 tid = bpf_get_current_pid_tgid();
	struct page_waiter *waiter = bpf_map_lookup_elem(&page_waiters, &tid);

	if (waiter) /* else it waited for a page's lock */
		end_wait(tid, waiter, bpf_ktime_get_ns());
	return 0;
}

/* Since 5.16. */
PROGRAM("fexit/folio_wait_bit", folio_wait_ends)
{
	return wait_ends();
}

PROGRAM("fexit/folio_wait_bit_killable", folio_wait_killable_ends)
{
	return wait_ends();
}

/* Before. */
PROGRAM("fexit/wait_on_page_bit", page_wait_ends)
{
	return wait_ends();
}

/*
 * Where fexit is refused. A task that waits for a page sleeps in io_schedule(), which the scheduler
 * shows; the first time that it sleeps otherwise, it has not waited at all: writeback was over
 * before it slept.
 */
SEC("tp_btf/sched_switch")
int switched(__u64 *ctx)
{
	bool preempted = ctx[0];
	struct task_struct *leaves = (struct task_struct *)ctx[1];
	struct task_struct *comes = (struct task_struct *)ctx[2];
	struct page_waiter *waiter;
	__u32 tid;

	if (!waiting)
		return 0;
	tid = leaves->pid;
	waiter = preempted ? NULL : bpf_map_lookup_elem(&page_waiters, &tid);
	if (waiter) {
		if (BPF_CORE_READ_BITFIELD(leaves, in_iowait))
			waiter->asleep = true;
		else
			end_wait(tid, waiter, waiter->begin_ns);
	}
	tid = comes->pid;
	waiter = bpf_map_lookup_elem(&page_waiters, &tid);
	if (waiter && waiter->asleep)
		end_wait(tid, waiter, bpf_ktime_get_ns());
	return 0;
}

INHERIT(page_wait, __u64, struct page_wait, ADD_ROW)
