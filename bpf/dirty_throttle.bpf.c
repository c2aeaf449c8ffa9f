// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Who is put to sleep in balance_dirty_pages, for how long, on which BDI, by which limit.
 *
 * The tracepoint fires before the sleep and names the pause it asks for. Where fentry is allowed
 * the sleep itself is measured around io_schedule_timeout; else the requested pause stands for it,
 * about one tick less than the truth.
 *
 * See README.md here for keys, values, kernels and cost.
 */
#include "cgroup.h"
#include "histogram.h"
#include "inherit.h"
#include "preempt.h"

enum pause_exponents { /* 1 ms .. 1.07 s */
	PAUSE_FIRST = 20,
	PAUSE_LAST = 30,
};

enum throttle_domain {
	DOMAIN_GLOBAL, /* vm.dirty_* */
	DOMAIN_BDI,    /* strict limit of the device */
	DOMAIN_MEMCG,  /* share of the cgroup's memory limit */
	DOMAINS,
};

struct throttle_key {
	__u64 cgroup;
	__u64 bdi; /* bdi->id */
};

struct throttle {
	enum pause_exponents pause_exponents[0];
	__u64 slept_ns;
	__u64 slept_slots[SLOTS(PAUSE_FIRST, PAUSE_LAST)];
	__u64 requested_ns;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, struct throttle_key);
	__type(value, struct throttle);
} dirty_throttle SEC(".maps");

struct bdi {
	enum throttle_domain domains[0];
	char name[64];
	__u64 pauses[DOMAINS];
	/* As the last event on the BDI said, of its writeback domain; pages and pages/s. */
	__u64 dirty;
	__u64 threshold;
	__u64 dirty_ratelimit;
	__u64 write_bandwidth;
	/* What found no room in dirty_throttle: attributed to no cgroup, but not lost. */
	struct throttle other;
};

struct sleeper {
	struct throttle_key key;
	enum throttle_domain domain;
	__u32 zero;
	__s64 pause;	/* requested, in ticks */
	__u64 event_ns; /* of the tracepoint */
	__u64 sleep_ns; /* measured only: asleep since; 0 = not yet */
	__u64 pause_ns; /* requested */
};

/* By thread id: asleep now, or about to be. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, __u32);
	__type(value, struct sleeper);
} sleepers SEC(".maps");

enum drop {
	DROP_DIRTY_THROTTLE, /* counted in bdi.other instead */
	DROP_BDIS,	     /* pause not counted */
	DROP_SLEEPERS,	     /* requested pause counted as sleep; not asleep now */
	DROPS,
};

#include "drops.h"
#include "bdi.h"

/* The dirty threshold that a task saw last in the global domain; up to 6.14 only. */
struct global_limit {
	__u32 tid;
	__u64 thresh;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct global_limit);
} global_limits SEC(".maps");

__u64 last_global_thresh;

/* Ticks a second. Not in the kernel's BTF; user space has it from clock_getres(2). */
const volatile __u32 hz = 250;
/* Sleep is measured by sleep_enter and sleep_exit. */
const volatile bool measured;

static const struct throttle no_throttle;

/* What the two signatures of the tracepoint say, in pages, pages/s and ticks. */
struct throttle_event {
	struct bdi_writeback *wb;
	__u64 dirty, thresh, wb_dirty, wb_thresh, dirty_ratelimit;
	__s64 pause;
	bool memcg;
};

static __always_inline struct throttle *throttle_of(struct throttle_key *key)
{
	struct throttle *throttle = bpf_map_lookup_elem(&dirty_throttle, key);
	struct bdi *bdi;

	if (throttle)
		return throttle;
	bpf_map_update_elem(&dirty_throttle, key, &no_throttle, BPF_NOEXIST);
	throttle = bpf_map_lookup_elem(&dirty_throttle, key);
	if (throttle)
		return throttle;
	drop(DROP_DIRTY_THROTTLE);
	bdi = bpf_map_lookup_elem(&bdis, &key->bdi);
	if (!bdi)
		return NULL;
	keep_check(bdi);
	return &bdi->other;
}

static __always_inline void count_pause(struct sleeper *sleeper, __u64 slept_ns)
{
	struct throttle *throttle = throttle_of(&sleeper->key);
	struct bdi *bdi = bpf_map_lookup_elem(&bdis, &sleeper->key.bdi);
	__u32 domain = sleeper->domain;

	if (throttle) {
		add(&throttle->requested_ns, sleeper->pause_ns);
		observe(&throttle->slept_ns, throttle->slept_slots, slept_ns, PAUSE_FIRST,
			PAUSE_LAST);
	}
	keep_check(domain);
	if (!bdi || domain >= DOMAINS)
		return;
	keep_check(bdi);
	add(&bdi->pauses[domain], 1);
}

/*
 * Which limit asked for the pause. Of the global domain and the memcg's the tracepoint shows the
 * one that the kernel selected. Under a strict limit of the device wb_position_ratio() takes the
 * smaller of two ratios, that of the domain and that of the wb. Both fall as dirty/threshold grows,
 * and both have the same ratio of background to hard threshold: so the fuller of the two has
 * decided.
 */
static __always_inline enum throttle_domain domain_of(struct throttle_event *event)
{
	if (has_strict_limit(event->wb->bdi) &&
	    event->wb_dirty * event->thresh >= event->dirty * event->wb_thresh)
		return DOMAIN_BDI;
	return event->memcg ? DOMAIN_MEMCG : DOMAIN_GLOBAL;
}

static __always_inline int throttled(struct throttle_event *event)
{
	struct backing_dev_info *kernel_bdi = event->wb->bdi;
	struct bdi *bdi = bdi_row(kernel_bdi);
	struct sleeper sleeper = {};
	__u32 tid = bpf_get_current_pid_tgid();

	if (!bdi)
		return 0;
	bdi->dirty = event->wb_dirty;
	bdi->threshold = event->wb_thresh;
	bdi->dirty_ratelimit = event->dirty_ratelimit;
	bdi->write_bandwidth = event->wb->avg_write_bandwidth;
	if (event->pause <= 0) /* behind its budget: no sleep */
		return 0;

	sleeper.key.cgroup = current_cgroup();
	sleeper.key.bdi = kernel_bdi->id;
	sleeper.domain = domain_of(event);
	sleeper.event_ns = bpf_ktime_get_ns();
	sleeper.pause = event->pause;
	sleeper.pause_ns = event->pause * 1000000000ULL / hz;
	if (bpf_map_update_elem(&sleepers, &tid, &sleeper, BPF_ANY))
		drop(DROP_SLEEPERS);
	else if (measured)
		return 0; /* counted when it has slept */
	count_pause(&sleeper, sleeper.pause_ns);
	return 0;
}

/* Up to 6.14: twelve arguments, and whose limit it is must be found out. */
static __always_inline bool is_memcg_domain(struct bdi_writeback *wb, __u64 thresh)
{
	__u32 zero = 0, tid = bpf_get_current_pid_tgid();
	struct global_limit *limit;

	if (!bpf_core_field_exists(wb->memcg_css) || !wb->memcg_css || !wb->memcg_css->parent)
		return false;
	limit = bpf_map_lookup_elem(&global_limits, &zero);
	if (limit && limit->tid == tid)
		return thresh != limit->thresh;
	return thresh != last_global_thresh; /* moved to another CPU in between */
}

PROGRAM("tp_btf/balance_dirty_pages", throttled_values)
{
	struct throttle_event event = {
		.wb = (struct bdi_writeback *)ctx[0],
		.thresh = ctx[1],
		.dirty = ctx[3],
		.wb_thresh = ctx[4],
		.wb_dirty = ctx[5],
		.dirty_ratelimit = ctx[6],
		.pause = ctx[10],
	};

	event.memcg = is_memcg_domain(event.wb, event.thresh);
	return throttled(&event);
}

/* The kernel calculates the global limits first, in the same call, without sleeping. */
PROGRAM("tp_btf/global_dirty_state", global_thresholds)
{
	struct global_limit *limit;
	__u32 zero = 0;

	limit = bpf_map_lookup_elem(&global_limits, &zero);
	if (!limit)
		return 0;
	limit->tid = bpf_get_current_pid_tgid();
	limit->thresh = ctx[1];
	last_global_thresh = ctx[1];
	return 0;
}

/* Since 6.16: eight arguments. */
PROGRAM("tp_btf/balance_dirty_pages", throttled_control)
{
	struct dirty_throttle_control *dtc = (struct dirty_throttle_control *)ctx[1];
	struct throttle_event event = {
		.wb = (struct bdi_writeback *)ctx[0],
		.thresh = dtc->thresh,
		.dirty = dtc->dirty,
		.wb_thresh = dtc->wb_thresh,
		.wb_dirty = dtc->wb_dirty,
		.dirty_ratelimit = ctx[2],
		.pause = ctx[6],
		.memcg = bpf_core_field_exists(dtc->gdtc) && dtc->gdtc,
	};

	return throttled(&event);
}

PROGRAM("fentry/io_schedule_timeout", sleep_enter)
{
	__u32 tid = bpf_get_current_pid_tgid();
	struct sleeper *sleeper = bpf_map_lookup_elem(&sleepers, &tid);

	/*
	 * Not there: another caller. A nowait write (BDP_ASYNC) is there and does not come here;
	 * what its thread waits for next is another caller's too, and asks for another time.
	 */
	if (sleeper && sleeper->pause == (__s64)ctx[0])
		sleeper->sleep_ns = bpf_ktime_get_ns();
	return 0;
}

PROGRAM("fexit/io_schedule_timeout", sleep_exit)
{
	__u32 tid = bpf_get_current_pid_tgid();
	struct sleeper *found = bpf_map_lookup_elem(&sleepers, &tid), sleeper;
	__u64 slept_ns;

	if (!found || !found->sleep_ns)
		return 0;
	sleeper = *found;
	slept_ns = ns_between(sleeper.sleep_ns, bpf_ktime_get_ns());
	bpf_map_delete_elem(&sleepers, &tid);
	count_pause(&sleeper, slept_ns);
	return 0;
}

#define ADD_BDI(heir, row)                                \
	do {                                              \
		ADD_ROW(&(heir)->pauses, &(row)->pauses); \
		ADD_ROW(&(heir)->other, &(row)->other);   \
	} while (0)

INHERIT(dirty_throttle, struct throttle_key, struct throttle, ADD_ROW)
INHERIT(bdis, __u64, struct bdi, ADD_BDI)
