// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * How long tasks are stalled for memory: what PSI counts as memory pressure, each stall by itself.
 *
 * The kernel marks begin and end of a stall (psi_memstall_enter, _leave); stalls nest, and only the
 * outermost counts, as for PSI.
 *
 * See README.md here for keys, values, kernels and cost.
 */
#include "cgroup.h"
#include "histogram.h"
#include "inherit.h"
#include "preempt.h"

enum stall_exponents { /* 65 us .. 137 s */
	STALL_FIRST = 16,
	STALL_LAST = 37,
};

struct stalls {
	enum stall_exponents stall_exponents[0];
	__u64 total_ns;
	__u64 slots[SLOTS(STALL_FIRST, STALL_LAST)];
};

/* By cgroup. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 8192);
	__type(key, __u64);
	__type(value, struct stalls);
} memory_stall SEC(".maps");

struct stall {
	__u64 start_ns;
	__u64 depth;
};

/* By thread id: stalled now. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, __u32);
	__type(value, struct stall);
} stalled SEC(".maps");

enum drop {
	DROP_MEMORY_STALL, /* counted for the cgroup OTHER_CGROUP */
	DROP_STALLED,	   /* the stall is not counted */
	DROPS,
};

#include "drops.h"

static const struct stalls no_stalls;

PROGRAM("fentry/psi_memstall_enter", stall_enter)
{
	struct task_struct *task = (struct task_struct *)bpf_get_current_task();
	struct stall fresh = { .start_ns = bpf_ktime_get_ns(), .depth = 1 }, *stall;
	__u32 tid = bpf_get_current_pid_tgid();

	/* In one already: one that we know, or that began before we came. */
	if (BPF_CORE_READ_BITFIELD_PROBED(task, in_memstall)) {
		stall = bpf_map_lookup_elem(&stalled, &tid);
		if (stall)
			stall->depth++;
		return 0;
	}
	if (bpf_map_update_elem(&stalled, &tid, &fresh, BPF_ANY))
		drop(DROP_STALLED);
	return 0;
}

/* Its argument says whether the stall was an inner one, and 5.10's verifier refuses to read it. */
PROGRAM("fentry/psi_memstall_leave", stall_leave)
{
	__u32 tid = bpf_get_current_pid_tgid();
	struct stall *stall = bpf_map_lookup_elem(&stalled, &tid);
	struct stalls *stalls;
	__u64 cgroup, took_ns;
	bool full;

	if (!stall || --stall->depth)
		return 0;
	took_ns = ns_between(stall->start_ns, bpf_ktime_get_ns());
	bpf_map_delete_elem(&stalled, &tid);
	cgroup = current_cgroup();
	stalls = cgroup_row(&memory_stall, &cgroup, &cgroup, &no_stalls, &full);
	if (full)
		drop(DROP_MEMORY_STALL);
	if (!stalls)
		return 0;
	keep_check(stalls);
	observe(&stalls->total_ns, stalls->slots, took_ns, STALL_FIRST, STALL_LAST);
	return 0;
}

INHERIT(memory_stall, __u64, struct stalls, ADD_ROW)
