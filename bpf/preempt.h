/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * A program that is not preempted. The kernel shows no event to a program that runs on that CPU
 * already, and counts it as missed. Since 7.0 a task can be preempted in a program at a tracepoint,
 * as it always could in one at a function, and then another task's event is lost: of 512 requests
 * of 64 writers in an emulated machine 65, and 3 with this, for what comes before the first
 * instruction is not ours.
 *
 * The loader makes these calls of bpf_preempt_disable() and bpf_preempt_enable() (6.10), and takes
 * them out where the kernel has no such functions. Weak symbols would do that too, but libbpf looks
 * for a missing one in the BTF of all modules, which needs CAP_SYS_ADMIN.
 */
#ifndef WRITEBACK_EXPORTER_PREEMPT_H
#define WRITEBACK_EXPORTER_PREEMPT_H

#include "kernel.h"

/* struct bpf_insn: BPF_JMP | BPF_CALL, src_reg BPF_PSEUDO_KFUNC_CALL, imm where the id will be. */
#define KFUNC_CALL(imm) \
	asm volatile(".8byte " imm "00002085" ::: "r0", "r1", "r2", "r3", "r4", "r5", "memory")

/*
 * A program with what follows as its body. Not one where nothing preempts (at sched_switch, under a
 * spinlock) or no other task can come (at the cgroup events, under cgroup_mutex).
 */
#define PROGRAM(section, name)                               \
	static __always_inline int name##_whole(__u64 *ctx); \
	SEC(section)                                         \
	int name(__u64 *ctx)                                 \
	{                                                    \
		int result;                                  \
                                                             \
		KFUNC_CALL("0x00000001");                    \
		result = name##_whole(ctx);                  \
		KFUNC_CALL("0x00000002");                    \
		return result;                               \
	}                                                    \
	static __always_inline int name##_whole(__u64 *ctx)

#endif
