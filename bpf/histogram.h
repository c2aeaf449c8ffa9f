/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Histograms in powers of two. Slot i of a histogram whose first exponent is F counts the values v
 * with 2^(F+i-1) < v <= 2^(F+i): a value equal to an edge belongs to that edge's slot, as
 * Prometheus' "le" wants it. Slot 0 takes all that is smaller; the last slot all above the last
 * edge, which is Prometheus' +Inf and never the last finite bucket.
 *
 * The first and last exponents reach user space as enums in the object's BTF, through members of
 * zero length: nothing here is written a second time in Python.
 */
#ifndef WRITEBACK_EXPORTER_HISTOGRAM_H
#define WRITEBACK_EXPORTER_HISTOGRAM_H

/*
 * Ties a value to one register. After a NULL check, before arithmetic on a map value (clang would
 * move the sum in front of the check), and before a bounds check (clang would check one copy and
 * use another): the verifier refuses both.
 */
#define keep_check(value) asm volatile("" : "+r"(value))

#define SLOTS(first, last) ((last) - (first) + 2)

/* The smallest e with v <= 2^e; 0 for 0 and 1. */
static __always_inline __u32 log2_ceil(__u64 v)
{
	__u32 e = 0, shift;

	if (v <= 1)
		return 0;
	v--;
	/* No count-leading-zeros instruction in BPF: five halvings, branches compiled to shifts. */
	shift = (v > 0xffffffffULL) << 5;
	v >>= shift;
	e |= shift;
	shift = (v > 0xffff) << 4;
	v >>= shift;
	e |= shift;
	shift = (v > 0xff) << 3;
	v >>= shift;
	e |= shift;
	shift = (v > 0xf) << 2;
	v >>= shift;
	e |= shift;
	shift = (v > 0x3) << 1;
	v >>= shift;
	e |= shift;
	e |= v >> 1;
	return e + 1;
}

static __always_inline __u32 slot_of(__u64 v, __u32 first, __u32 last)
{
	__u32 e = log2_ceil(v), overflow = last - first + 1;
	__u32 slot = e > first ? e - first : 0;

	/* Up to 6.1 the verifier loses the bounds of a sum of shifts: checked here, where it looks.
	 */
	keep_check(slot);
	return slot < overflow ? slot : overflow;
}

static __always_inline void add(__u64 *counter, __u64 n)
{
	/* Relaxed, so that clang 20 too makes it the plain add that 5.10 knows. */
	__atomic_fetch_add(counter, n, __ATOMIC_RELAXED);
}

/* Counts a value: in its slot, and in the sum of all. */
static __always_inline void observe(__u64 *sum, __u64 *slots, __u64 v, __u32 first, __u32 last)
{
	add(sum, v);
	add(&slots[slot_of(v, first, last)], 1);
}

/*
 * From one reading of the clock to another. The NMI-safe one, bpf_ktime_get_ns(), may be a little
 * behind another CPU's, or the kernel's: such a time is 0, not 2^64 - n.
 */
static __always_inline __u64 ns_between(__u64 from, __u64 to)
{
	__u64 ns = to - from;

	if (ns >> 63)
		ns = 0;
	/* Of an addition of 0 clang 14 makes an atomic load, which BPF has not. */
	keep_check(ns);
	return ns;
}

#endif
