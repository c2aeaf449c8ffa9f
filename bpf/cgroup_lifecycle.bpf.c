// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Cgroups as they come and go, so that one that lived 5 ms has its right name.
 *
 *	mkdir    before a task can be in it
 *	rename   v1 only
 *	rmdir    no task is in it any more; its dirty pages may still be written
 *	release  nothing refers to it any more: no further IO can be its own
 *
 * See README.md here for keys, values, kernels and cost.
 */
#include "kernel.h"

enum cgroup_event_kind {
	CGROUP_MKDIR,
	CGROUP_RENAME,
	CGROUP_RMDIR,
	CGROUP_RELEASE,
};

#define PATH_SIZE 1024 /* TRACE_CGROUP_PATH_LEN, kernel/cgroup/cgroup-internal.h */

struct cgroup_event {
	__u64 id;
	__u32 hierarchy; /* 0 is v2 */
	enum cgroup_event_kind kind;
	char path[PATH_SIZE]; /* below the hierarchy's root; only its bytes are sent */
};

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20); /* about 8,000 events */
} cgroup_events SEC(".maps");

/*
 * What user space knows of cgroups that cannot be learnt again: kept here for an exporter that
 * comes after a killed one, and by nobody else.
 */
struct cgroup_identity {
	__u64 id;
	__u32 hierarchy;
	__u32 zero;
};

struct exited_cgroup {
	__u32 released;
	char path[PATH_SIZE];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 32768);
	__uint(map_flags, BPF_F_NO_PREALLOC); /* a path takes a kilobyte */
	__type(key, struct cgroup_identity);
	__type(value, struct exited_cgroup);
} exited_cgroups SEC(".maps");

/* Which have a label, and which are exported as other though no rule says so. */
enum cgroup_label {
	LABEL_OWN,
	LABEL_LIMIT,
	LABEL_NO_NAME,
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct cgroup_identity);
	__type(value, enum cgroup_label);
} cgroup_labels SEC(".maps");

enum drop {
	DROP_CGROUP_EVENTS, /* user space walks the tree again */
	DROPS,
};

#include "drops.h"

/* Larger than the stack. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct cgroup_event);
} scratch SEC(".maps");

/* Whose cgroups own IO, are throttled, have memory; a hybrid host has ten others. */
const volatile __u32 io_hierarchy;
const volatile __u32 task_hierarchy;
const volatile __u32 memory_hierarchy;

static __always_inline int send(__u64 *ctx, enum cgroup_event_kind kind)
{
	struct cgroup *cgroup = (struct cgroup *)ctx[0];
	__u32 zero = 0, hierarchy = cgroup->root->hierarchy_id;
	struct cgroup_event *event;
	long length;

	if (hierarchy != io_hierarchy && hierarchy != task_hierarchy &&
	    hierarchy != memory_hierarchy)
		return 0;
	event = bpf_map_lookup_elem(&scratch, &zero);
	if (!event)
		return 0;
	event->id = cgroup_id(cgroup);
	event->hierarchy = hierarchy;
	event->kind = kind;
	length = bpf_probe_read_kernel_str(event->path, PATH_SIZE, (void *)ctx[1]);
	if (length < 0)
		length = 0;
	if (length > PATH_SIZE)
		length = PATH_SIZE;
	if (bpf_ringbuf_output(&cgroup_events, event,
			       __builtin_offsetof(struct cgroup_event, path) + length, 0)) {
		drop(DROP_CGROUP_EVENTS);
	}
	return 0;
}

SEC("tp_btf/cgroup_mkdir")
int cgroup_mkdir(__u64 *ctx)
{
	return send(ctx, CGROUP_MKDIR);
}

SEC("tp_btf/cgroup_rename")
int cgroup_rename(__u64 *ctx)
{
	return send(ctx, CGROUP_RENAME);
}

SEC("tp_btf/cgroup_rmdir")
int cgroup_rmdir(__u64 *ctx)
{
	return send(ctx, CGROUP_RMDIR);
}

SEC("tp_btf/cgroup_release")
int cgroup_release(__u64 *ctx)
{
	return send(ctx, CGROUP_RELEASE);
}
