// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Who waits in fsync, fdatasync, sync, syncfs, msync and sync_file_range, how long, and who is in
 * one now.
 *
 * By fentry and fexit of the system calls' own functions, which costs other calls nothing. By
 * tracepoints only where the operator asks for it: with one of them in use, every system call of
 * every task takes the kernel's slow path.
 *
 * See README.md here for keys, values, kernels and cost.
 */
#include "cgroup.h"
#include "histogram.h"
#include "inherit.h"
#include "preempt.h"

enum sync_exponents { /* 65 us .. 9 min */
	SYNC_FIRST = 16,
	SYNC_LAST = 39,
};

enum sync_call {
	CALL_FSYNC,
	CALL_FDATASYNC,
	CALL_SYNC,
	CALL_SYNCFS,
	CALL_MSYNC,
	CALL_SYNC_FILE_RANGE,
};

struct sync_key {
	__u64 cgroup;
	enum sync_call call;
	__u32 zero;
};

struct sync_calls {
	enum sync_exponents sync_exponents[0];
	__u64 total_ns;
	__u64 slots[SLOTS(SYNC_FIRST, SYNC_LAST)];
	__u64 errors;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 8192);
	__type(key, struct sync_key);
	__type(value, struct sync_calls);
} sync SEC(".maps");

struct open_call {
	struct sync_key key;
	__u64 start_ns;
	__u64 task;   /* struct task_struct */
	__u64 regs;   /* struct pt_regs of the caller, on its kernel stack; 0 where not known */
	__u64 number; /* of the system call, as regs has it */
};

/* By thread id: in a call now. A thread is in one at a time. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 8192);
	__type(key, __u32);
	__type(value, struct open_call);
} open_calls SEC(".maps");

enum drop {
	DROP_SYNC,	 /* counted for the cgroup OTHER_CGROUP */
	DROP_OPEN_CALLS, /* no room, or its end was not shown to us: the call is not counted */
	DROPS,
};

#include "drops.h"

static const struct sync_calls no_calls;

/* The system call that a thread is in, by its registers; another one, or none, once it returned. */
static __always_inline __u64 call_number(__u64 regs)
{
	struct pt_regs___x86 *x86 = (void *)regs;
	struct pt_regs___arm64 *arm64 = (void *)regs;

	if (!regs)
		return 0;
	if (bpf_core_field_exists(x86->orig_ax))
		return BPF_CORE_READ(x86, orig_ax);
	return BPF_CORE_READ(arm64, syscallno);
}

/* `regs`: the caller's registers, for kernels that cannot tell; 0 where not known either. */
static __always_inline int begin(enum sync_call call, __u64 regs)
{
	__u32 tid = bpf_get_current_pid_tgid();
	struct open_call open = {
		.key.cgroup = current_cgroup(),
		.key.call = call,
		.start_ns = bpf_ktime_get_ns(),
		.task = bpf_get_current_task(),
	};

	if (bpf_core_enum_value_exists(enum bpf_func_id, BPF_FUNC_task_pt_regs)) /* 5.15 */
		open.regs = bpf_task_pt_regs(bpf_get_current_task_btf());
	else
		open.regs = regs;
	open.number = call_number(open.regs);
	if (bpf_map_lookup_elem(&open_calls, &tid)) /* its end was not shown to us */
		drop(DROP_OPEN_CALLS);
	if (bpf_map_update_elem(&open_calls, &tid, &open, BPF_ANY))
		drop(DROP_OPEN_CALLS);
	return 0;
}

static __always_inline int end(__s64 result)
{
	__u32 tid = bpf_get_current_pid_tgid();
	struct open_call *open = bpf_map_lookup_elem(&open_calls, &tid);
	struct sync_calls *calls;
	struct sync_key key;
	__u64 took_ns;
	bool full;

	if (!open) /* found no room, or was open before we came */
		return 0;
	took_ns = ns_between(open->start_ns, bpf_ktime_get_ns());
	key = open->key;
	bpf_map_delete_elem(&open_calls, &tid);
	calls = cgroup_row(&sync, &key, &key.cgroup, &no_calls, &full);
	if (full)
		drop(DROP_SYNC);
	if (!calls)
		return 0;
	keep_check(calls);
	observe(&calls->total_ns, calls->slots, took_ns, SYNC_FIRST, SYNC_LAST);
	if (result < 0)
		add(&calls->errors, 1);
	return 0;
}

/*
 * Each function has the caller's registers as its argument, and returns long. User space says which
 * one it is (__x64_sys_fsync, __arm64_sys_fsync, ...), and for `_compat` the one that 32 bit
 * programs come through where that is another. msync's argument has no type in the BTF of 5.10,
 * which took the function from kernel/sys_ni.c, and must not be looked at.
 */
#define FUNCTION(name, call, regs)        \
	PROGRAM("fexit", name##_exit)     \
	{                                 \
		return end(ctx[1]);       \
	}                                 \
	PROGRAM("fentry", name##_enter)   \
	{                                 \
		return begin(call, regs); \
	}

FUNCTION(fsync, CALL_FSYNC, ctx[0])
FUNCTION(fsync_compat, CALL_FSYNC, ctx[0])
FUNCTION(fdatasync, CALL_FDATASYNC, ctx[0])
FUNCTION(fdatasync_compat, CALL_FDATASYNC, ctx[0])
FUNCTION(sync, CALL_SYNC, ctx[0])
FUNCTION(syncfs, CALL_SYNCFS, ctx[0])
FUNCTION(syncfs_compat, CALL_SYNCFS, ctx[0])
FUNCTION(msync, CALL_MSYNC, 0)
FUNCTION(msync_compat, CALL_MSYNC, 0)
FUNCTION(sync_file_range, CALL_SYNC_FILE_RANGE, ctx[0])
FUNCTION(sync_file_range_compat, CALL_SYNC_FILE_RANGE, ctx[0])

/*
 * The record that a program sees (struct syscall_tp_t): type, number, result or first argument.
 * Nothing preempts here (perf_syscall_enter, kernel/trace/trace_syscalls.c).
 */
#define TRACEPOINT(name, call)              \
	SEC("tp/syscalls/sys_exit_" #name)  \
	int name##_exit_tp(__u64 *ctx)      \
	{                                   \
		return end(ctx[2]);         \
	}                                   \
	SEC("tp/syscalls/sys_enter_" #name) \
	int name##_enter_tp(__u64 *ctx)     \
	{                                   \
		return begin(call, 0);      \
	}

TRACEPOINT(fsync, CALL_FSYNC)
TRACEPOINT(fdatasync, CALL_FDATASYNC)
TRACEPOINT(sync, CALL_SYNC)
TRACEPOINT(syncfs, CALL_SYNCFS)
TRACEPOINT(msync, CALL_MSYNC)
TRACEPOINT(sync_file_range, CALL_SYNC_FILE_RANGE)

/*
 * Whether the thread args[0] is still in its call: user space asks, of calls that seem to be open
 * for long. The end of one that is open while anybody attaches to its function or detaches, such as
 * a second exporter, is shown to nobody: the kernel replaces the trampoline, and what returns
 * through the old one skips its fexit programs (bpf_tramp_image_put, kernel/bpf/trampoline.c).
 *
 * The task may be gone; what is read of freed memory is that it has exited, or another thread's id.
 */
SEC("raw_tp")
int still_open(struct bpf_raw_tracepoint_args *ctx)
{
	__u32 tid = ctx->args[0];
	struct open_call *open = bpf_map_lookup_elem(&open_calls, &tid);
	struct task_struct *task;

	if (!open)
		return 0;
	task = (struct task_struct *)open->task;
	if ((__u32)BPF_CORE_READ(task, pid) == tid && !BPF_CORE_READ(task, exit_state) &&
	    call_number(open->regs) == open->number)
		return 1;
	bpf_map_delete_elem(&open_calls, &tid);
	drop(DROP_OPEN_CALLS);
	return 0;
}

INHERIT(sync, struct sync_key, struct sync_calls, ADD_ROW)
