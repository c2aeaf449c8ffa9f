/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The current task's cgroup, and maps by cgroup that never lose what they count. */
#ifndef WRITEBACK_EXPORTER_CGROUP_H
#define WRITEBACK_EXPORTER_CGROUP_H

#include "kernel.h"

/*
 * For whom there is no room in a map. User space makes the entries of this id at start, so that
 * they always have room; no cgroup has it, for kernfs counts its ids up from 1.
 */
#define OTHER_CGROUP (~0ULL)

/* Cgroups are those of the v1 memory hierarchy (no v2 hierarchy is mounted). */
const volatile bool memory_v1;

/* What a controller has for a task: that of the nearest cgroup where it is on. */
static __always_inline struct cgroup_subsys_state *task_css(struct task_struct *task,
							    __u32 controller)
{
	struct css_set *cgroups = BPF_CORE_READ(task, cgroups);
	struct cgroup_subsys_state *css = NULL, **subsys;

	subsys = __builtin_preserve_access_index(&cgroups->subsys[0]);
	bpf_probe_read_kernel(&css, sizeof(css), subsys + controller);
	return css;
}

/* The id of the current task's cgroup, in the hierarchy that names tasks. */
static __always_inline __u64 current_cgroup(void)
{
	struct cgroup_subsys_state *css;

	if (!memory_v1)
		return bpf_get_current_cgroup_id();
	css = task_css((struct task_struct *)bpf_get_current_task(),
		       bpf_core_enum_value(enum cgroup_subsys_id, memory_cgrp_id));
	return BPF_CORE_READ(css, cgroup, kn, id);
}

/*
 * The value of a key in a map, made from `empty` if need be; of the key with OTHER_CGROUP where the
 * map is full, which *full then says. `cgroup` is the key's.
 */
static __always_inline void *cgroup_row(void *map, void *key, __u64 *cgroup, const void *empty,
					bool *full)
{
	void *row = bpf_map_lookup_elem(map, key);

	*full = false;
	if (row)
		return row;
	bpf_map_update_elem(map, key, empty, BPF_NOEXIST);
	row = bpf_map_lookup_elem(map, key);
	if (row)
		return row;
	*full = true;
	*cgroup = OTHER_CGROUP;
	return bpf_map_lookup_elem(map, key);
}

#endif
