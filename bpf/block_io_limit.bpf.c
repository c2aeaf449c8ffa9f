// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * How long limits hold IO back before it becomes a request, which no tracepoint shows.
 *
 *	io.max	blk-throttle queues the bio, once a cgroup that it passes on its way up:
 *		throttle_hold, throttle_release
 *	iocost	the submitting task waits in a queue of the cgroup's: iocost_hold, iocost_release
 *	wbt	the task that writes back waits for others' requests to end: wbt_hold, wbt_release
 *	io.latency
 *		the task that submits waits until requests of its cgroup, or of one above, end:
 *		iolatency_enter, iolatency_exit
 *
 * Each hook is a function that the kernel calls for IO that is held; prepare_to_wait_exclusive()
 * also for some that wait for something else. io.latency's run, held or not, for each bio on a disk
 * where a cgroup has an io.latency, once a level of its cgroup, and for each buffered write to a
 * disk where wbt is on; but they are loaded only where the kernel has io.latency.
 *
 * See README.md here for keys, values, kernels and cost.
 */
#include "cgroup.h"
#include "histogram.h"
#include "inherit.h"
#include "preempt.h"

enum limit_exponents { /* 16 us .. 68 s */
	LIMIT_FIRST = 14,
	LIMIT_LAST = 36,
};

enum limit {
	LIMIT_MAX, /* io.max, blkio.throttle */
	LIMIT_QOS, /* iocost, wbt, io.latency */
	LIMITS,
};

struct limit_key {
	__u64 cgroup; /* id; 0 where the IO's owner is not known */
	__u64 gendisk;
	__u32 dev;
	enum limit limit;
};

struct limit_histogram {
	enum limit_exponents exponents[0];
	__u64 ns;
	__u64 slots[SLOTS(LIMIT_FIRST, LIMIT_LAST)];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 8192);
	__type(key, struct limit_key);
	__type(value, struct limit_histogram);
} block_io_limit SEC(".maps");

/* A disk that is plugged in under an old number has another gendisk, and begins anew. */
struct limit_disk_id {
	__u64 gendisk;
	__u64 dev; /* major << 20 | minor */
};

struct limit_disk {
	__u64 since_ns; /* first held IO then: of two under one name the later one is there */
	char name[32];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1024);
	__type(key, struct limit_disk_id);
	__type(value, struct limit_disk);
} limit_disks SEC(".maps");

struct hold {
	struct limit_key key;
	__u64 since_ns;
	__u64 task; /* that waits in iocost's queue */
};

/* By address, of the bio (io.max) or of the task's entry in a queue (iocost, wbt). */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, __u64);
	__type(value, struct hold);
} limit_held SEC(".maps");

#define WAITERS_LOG2 14

struct waiter {
	__u64 since_ns;
	__u64 sleeps; /* of the task so far */
	__u32 tid;
	__u32 zero;
};

/*
 * Tasks in rq_qos_wait(), asleep or not, by thread id. A slot belongs to whoever came last: most
 * are here for less than a microsecond, and two whose ids have the same end are hardly ever here at
 * once. Hash map updates would cost more than all the rest.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1 << WAITERS_LOG2);
	__type(key, __u32);
	__type(value, struct waiter);
} limit_waiters SEC(".maps");

enum drop {
	DROP_BLOCK_IO_LIMIT, /* counted as cgroup "other" instead */
	DROP_LIMIT_DISKS,    /* wait not counted */
	DROP_LIMIT_HELD,     /* wait not counted */
	DROP_LIMIT_WAITERS,  /* wait not counted, if it was one */
	DROPS,
};

#include "drops.h"

/* throtl_pop_queued() has a third argument, the direction, since a kernel between 6.12 and 6.18. */
const volatile bool direction_argument;

#define E2BIG 7
#define PF_WQ_WORKER 0x20
#define PF_KTHREAD 0x200000

static const struct limit_histogram no_waits;

/*
 * A program's argument as a number. Of a pointer to a struct the verifier allows no arithmetic and
 * may take for granted that it is not NULL; a pointer's address not all of them let us read.
 */
static __always_inline __u64 number(__u64 *argument)
{
	__u64 value = 0;

	bpf_probe_read_kernel(&value, sizeof(value), argument);
	return value;
}

static __always_inline struct gendisk *bio_disk(struct bio *bio)
{
	struct bio___before_5_12 *old = (void *)bio;

	if (bpf_core_field_exists(old->bi_disk))
		return BPF_CORE_READ(old, bi_disk);
	return BPF_CORE_READ(bio, bi_bdev, bd_disk);
}

static __always_inline struct gendisk *queue_disk(struct request_queue *queue)
{
	struct request_queue___before_5_15 *old = (void *)queue;
	struct kobject *directory;

	if (bpf_core_field_exists(queue->disk))
		return BPF_CORE_READ(queue, disk);
	if (!bpf_core_field_exists(struct gendisk___before_5_11, part0.__dev.kobj))
		return NULL;
	directory = BPF_CORE_READ(old, kobj.parent);
	if (!directory)
		return NULL;
	return (void *)directory -
	       bpf_core_field_offset(struct gendisk___before_5_11, part0.__dev.kobj);
}

static __always_inline struct gendisk *qos_disk(struct rq_qos *rqos)
{
	struct rq_qos___before_6_3 *old = (void *)rqos;

	if (bpf_core_field_exists(rqos->disk))
		return BPF_CORE_READ(rqos, disk);
	return queue_disk(BPF_CORE_READ(old, q));
}

/* Completes the key, and has the disk's name known and room for those who find none. */
static __always_inline bool know_disk(struct limit_key *key, struct gendisk *gd)
{
	__u32 major = BPF_CORE_READ(gd, major), minor = BPF_CORE_READ(gd, first_minor);
	struct limit_disk_id id = { .gendisk = (__u64)gd, .dev = major << 20 | minor };
	struct limit_key other = { .cgroup = OTHER_CGROUP, .gendisk = id.gendisk, .dev = id.dev };
	struct limit_disk disk = {};

	if (!gd)
		return false;
	key->gendisk = id.gendisk;
	key->dev = id.dev;
	if (bpf_map_lookup_elem(&limit_disks, &id))
		return true;
	disk.since_ns = bpf_ktime_get_ns();
	bpf_probe_read_kernel_str(disk.name, sizeof(disk.name),
				  __builtin_preserve_access_index(&gd->disk_name));
	if (bpf_map_update_elem(&limit_disks, &id, &disk, BPF_ANY))
		return false;
	other.limit = LIMIT_MAX;
	bpf_map_update_elem(&block_io_limit, &other, &no_waits, BPF_NOEXIST);
	other.limit = LIMIT_QOS;
	bpf_map_update_elem(&block_io_limit, &other, &no_waits, BPF_NOEXIST);
	return true;
}

static __always_inline void count_wait(struct limit_key *key, __u64 since_ns)
{
	__u64 waited_ns = ns_between(since_ns, bpf_ktime_get_ns());
	struct limit_histogram *waits;
	bool full;

	waits = cgroup_row(&block_io_limit, key, &key->cgroup, &no_waits, &full);
	if (full)
		drop(DROP_BLOCK_IO_LIMIT);
	if (waits)
		observe(&waits->ns, waits->slots, waited_ns, LIMIT_FIRST, LIMIT_LAST);
}

static __always_inline __u64 bio_owner(struct bio *bio)
{
	return BPF_CORE_READ(bio, bi_blkg, blkcg, css.cgroup, kn, id);
}

static __always_inline void begin_hold(__u64 *address, enum limit limit, __u64 cgroup,
				       struct gendisk *disk, __u64 flags)
{
	struct hold hold = {
		.key = { .cgroup = cgroup, .limit = limit },
		.task = bpf_get_current_task(),
	};

	if (!know_disk(&hold.key, disk)) {
		drop(DROP_LIMIT_DISKS);
		return;
	}
	hold.since_ns = bpf_ktime_get_ns();
	if (bpf_map_update_elem(&limit_held, address, &hold, flags) == -E2BIG)
		drop(DROP_LIMIT_HELD);
}

/* What was held there, which now goes on; false where nothing was. */
static __always_inline bool end_hold(__u64 *address, struct hold *hold)
{
	struct hold *found = bpf_map_lookup_elem(&limit_held, address);

	if (!found)
		return false;
	*hold = *found;
	bpf_map_delete_elem(&limit_held, address);
	return true;
}

/* (bio, qnode, throtl_grp): the bio is over a limit of this cgroup, and queued. */
SEC("fentry/throtl_add_bio_tg")
int throttle_hold(__u64 *ctx)
{
	struct bio *bio = (struct bio *)ctx[0];
	__u64 address = ctx[0];

	/*
	 * It is queued again for each cgroup above: the first time counts. Without a qnode it is
	 * the first for sure, whatever is there is left from a bio whose end we did not see.
	 */
	begin_hold(&address, LIMIT_MAX, bio_owner(bio), bio_disk(bio),
		   number(&ctx[1]) ? BPF_NOEXIST : BPF_ANY);
	return 0;
}

/*
 * (queue, throtl_grp **to_put, bool direction) = bio: taken out of a cgroup's queue, to go into the
 * next one's; or, without to_put, out of the disk's queue of all that no limit holds any more, to
 * be submitted (blk_throtl_dispatch_work_fn). So also go the bios of removed cgroups and disks.
 */
SEC("fexit/throtl_pop_queued")
int throttle_release(__u64 *ctx)
{
	struct hold hold;
	__u64 bio;

	if (number(&ctx[1]))
		return 0;
	if (direction_argument) {
		bio = ctx[3];
		/* Two loads, not one at a computed offset: the verifier refuses that. */
		asm volatile("" : "+r"(bio));
	} else {
		bio = ctx[2];
	}
	if (end_hold(&bio, &hold))
		count_wait(&hold.key, hold.since_ns);
	return 0;
}

/*
 * (iocg, pay_debt, now), with the queue locked: a timer's, or by a task that has just queued itself
 * last.
 */
SEC("fentry/iocg_kick_waitq")
int iocost_hold(__u64 *ctx)
{
	struct ioc_gq *iocg = (struct ioc_gq *)ctx[0];
	struct list_head *last = BPF_CORE_READ(iocg, waitq.head.prev);
	struct iocg_wait *wait = (void *)last - bpf_core_field_offset(struct iocg_wait, wait.entry);
	__u64 address = (__u64)wait;
	struct bio *bio;

	if (last == __builtin_preserve_access_index(&iocg->waitq.head))
		return 0;
	if (BPF_CORE_READ(wait, wait.private) != (void *)bpf_get_current_task())
		return 0;
	/* There already: a timer that came just before the task slept. */
	bio = BPF_CORE_READ(wait, bio);
	begin_hold(&address, LIMIT_QOS, bio_owner(bio), bio_disk(bio), BPF_NOEXIST);
	return 0;
}

/* (wait_queue_entry, mode, flags, key) = 0 where the task may go on; its stack is gone by now. */
SEC("fexit/iocg_wake_fn")
int iocost_release(__u64 *ctx)
{
	struct hold hold;
	__u64 address = ctx[0];

	if ((int)ctx[4] || !end_hold(&address, &hold))
		return 0;
	if (hold.task != bpf_get_current_task()) /* else it could go on at once, and never slept */
		count_wait(&hold.key, hold.since_ns);
	return 0;
}

/*
 * Whose IO the current task submits. There is no bio to ask here: but a flusher writes for one
 * cgroup at a time, and its work item tells which, whom others sync their own files.
 */
static __always_inline struct cgroup_subsys_state *submitter(struct task_struct *task)
{
	struct task_struct___before_5_17 *old = (void *)task;
	unsigned int flags = BPF_CORE_READ(task, flags);
	const char flusher[] = { 'f', 'l', 'u', 's', 'h', '-' };
	char description[sizeof(flusher)] = {};
	struct bdi_writeback *wb;
	struct kthread *kthread;
	struct worker *worker;
	__u32 i;

	if (!(flags & PF_KTHREAD))
		return task_css(task, bpf_core_enum_value(enum cgroup_subsys_id, io_cgrp_id));
	if (!(flags & PF_WQ_WORKER))
		return NULL;
	if (bpf_core_field_exists(task->worker_private))
		kthread = BPF_CORE_READ(task, worker_private);
	else
		kthread = (struct kthread *)BPF_CORE_READ(old, set_child_tid);
	worker = BPF_CORE_READ(kthread, data);
	/* "flush-MAJOR:MINOR": wb_workfn() */
	bpf_probe_read_kernel(description, sizeof(description),
			      __builtin_preserve_access_index(&worker->desc));
#pragma unroll
	for (i = 0; i < sizeof(description); i++)
		if (description[i] != flusher[i])
			return NULL;
	wb = (void *)BPF_CORE_READ(worker, current_work) -
	     bpf_core_field_offset(struct bdi_writeback, dwork.work);
	return BPF_CORE_READ(wb, blkcg_css);
}

static __always_inline struct waiter *slot_of_waiter(__u32 tid)
{
	__u32 index = tid & ((1 << WAITERS_LOG2) - 1);

	return bpf_map_lookup_elem(&limit_waiters, &index);
}

/* (rq_wait, private_data, ...): room for another request is taken, or waited for. */
PROGRAM("fentry/rq_qos_wait", iolatency_enter)
{
	struct task_struct *task = (struct task_struct *)bpf_get_current_task();
	__u32 tid = bpf_get_current_pid_tgid();
	struct waiter *waiter = slot_of_waiter(tid);

	if (!waiter)
		return 0;
	waiter->tid = tid;
	waiter->sleeps = BPF_CORE_READ(task, nvcsw);
	waiter->since_ns = bpf_ktime_get_ns();
	return 0;
}

/* When the current task entered; 0 where it has not slept since. */
static __always_inline __u64 held_since(struct task_struct *task)
{
	__u32 tid = bpf_get_current_pid_tgid();
	struct waiter *waiter = slot_of_waiter(tid);

	if (!waiter)
		return 0;
	if (waiter->tid != tid) {
		drop(DROP_LIMIT_WAITERS);
		return 0;
	}
	waiter->tid = 0;
	return BPF_CORE_READ(task, nvcsw) == waiter->sleeps ? 0 : waiter->since_ns;
}

static __always_inline void count_qos(struct rq_qos *rqos, struct cgroup_subsys_state *owner,
				      __u64 since_ns)
{
	struct limit_key key = {
		.cgroup = BPF_CORE_READ(owner, cgroup, kn, id),
		.limit = LIMIT_QOS,
	};

	if (know_disk(&key, qos_disk(rqos)))
		count_wait(&key, since_ns);
	else
		drop(DROP_LIMIT_DISKS);
}

/*
 * (queue, entry, state): a task is about to sleep. In rq_qos_wait(), where there was no room, the
 * entry is in a struct that names the queue's owner; of others the same place holds anything, but
 * hardly this queue.
 */
PROGRAM("fentry/prepare_to_wait_exclusive", wbt_hold)
{
	__u64 address = number(&ctx[1]);
	struct rq_qos_wait_data *data =
		(void *)address - bpf_core_field_offset(struct rq_qos_wait_data, wq);
	struct rq_wait *room = BPF_CORE_READ(data, rqw);
	struct wbt_wait_data *private;
	struct rq_wb *rwb;
	__u64 place, cgroup;

	if ((__u64)__builtin_preserve_access_index(&room->wait) != number(&ctx[0]))
		return 0;
	private = BPF_CORE_READ(data, private_data);
	rwb = BPF_CORE_READ(private, rwb);
	place = (__u64)room - (__u64)__builtin_preserve_access_index(&rwb->rq_wait);
	/* Of io.latency, which waits here too, the private data is something else. */
	if (place >= bpf_core_field_size(rwb->rq_wait))
		return 0;
	cgroup = BPF_CORE_READ(submitter((struct task_struct *)bpf_get_current_task()), cgroup, kn,
			       id);
	/* There may be one of a task that got room before it slept. */
	begin_hold(&address, LIMIT_QOS, cgroup,
		   qos_disk(__builtin_preserve_access_index(&rwb->rqos)), BPF_ANY);
	return 0;
}

/* (entry, mode, flags, key) = 1 where the task has got room; its stack is another's soon. */
SEC("fexit/rq_qos_wake_function")
int wbt_release(__u64 *ctx)
{
	struct hold hold;
	__u64 address = number(&ctx[0]);

	if ((int)ctx[4] == 1 && end_hold(&address, &hold))
		count_wait(&hold.key, hold.since_ns);
	return 0;
}

static __always_inline bool is_iolatency(__u64 *ctx)
{
	return number(&ctx[0]) - ctx[1] == bpf_core_field_offset(struct iolatency_grp, rq_wait);
}

/* Deeper ones, which hardly anybody has, are taken for others. */
#define LEVELS 16

static __always_inline bool is_within(struct cgroup_subsys_state *css,
				      struct cgroup_subsys_state *top)
{
	__u32 i;

	for (i = 0; i < LEVELS; i++) {
		if (css == top)
			return true;
		css = BPF_CORE_READ(css, parent);
	}
	return false;
}

/*
 * The cgroup that is held may be any on the bio's way up from its owner, who is the submitter,
 * unless that is outside or nobody: a worker of a loop device or of device mapper, or a task that
 * syncs another cgroup's file. Then all that is known of the owner is that it is within.
 */
static __always_inline void count_iolatency(__u64 *ctx, struct task_struct *task, __u64 since_ns)
{
	struct iolatency_grp *iolat = (void *)ctx[1];
	struct blk_iolatency *policy = BPF_CORE_READ(iolat, blkiolat);
	struct blkcg *blkcg = BPF_CORE_READ(iolat, pd.blkg, blkcg);
	struct cgroup_subsys_state *held = __builtin_preserve_access_index(&blkcg->css);
	struct cgroup_subsys_state *owner = submitter(task);

	if (!is_within(owner, held))
		owner = held;
	count_qos(__builtin_preserve_access_index(&policy->rqos), owner, since_ns);
}

PROGRAM("fexit/rq_qos_wait", iolatency_exit)
{
	struct task_struct *task = (struct task_struct *)bpf_get_current_task();
	__u64 since_ns = held_since(task);

	if (since_ns && is_iolatency(ctx))
		count_iolatency(ctx, task, since_ns);
	return 0;
}

INHERIT(block_io_limit, struct limit_key, struct limit_histogram, ADD_ROW)
