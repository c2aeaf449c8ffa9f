#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# /init of a test guest: makes a root of the host's userland (virtiofs, read-only) with a tmpfs
# over it, runs /out/command in it, leaves what came of it in /out, and switches the machine off.
# Runs under the initramfs' busybox throughout.

stop() {
	echo "init: $*"
	poweroff -n -f
}

/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
for module in /modules/*.ko; do
	insmod "$module" || echo "init: cannot load $module"
done

mount -t virtiofs host /host || stop "cannot mount the host's share"
mount -t tmpfs -o size=75% tmpfs /run
mkdir /run/upper /run/work
mount -t overlay -o lowerdir=/host,upperdir=/run/upper,workdir=/run/work root /newroot ||
	stop "cannot lay a tmpfs over the host's share"

cd /newroot
mkdir -p dev proc sys run tmp mnt root var/tmp usr/lib/modules out
chmod 1777 tmp var/tmp
for directory in dev proc sys; do
	mount --move /$directory $directory
done
mount -t tmpfs tmpfs run
mkdir -p dev/shm dev/pts
mount -t tmpfs tmpfs dev/shm
mount -t devpts devpts dev/pts
# Past the overlay, which would keep what is written to it.
mount --bind /host/out out || stop "no /out"
mount --bind /host/lib-modules usr/lib/modules || stop "no modules"

# What runs to the end must not come from the share, whose server may be the first to stop.
cp /bin/busybox run/busybox
# poweroff -n: no sync, which a throttled or failing disk would hold up. /out is written through.
cat >run/guest <<'END'
export HOME=/root LANG=C.UTF-8 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
/run/busybox cut -d" " -f1 /proc/uptime >/out/uptime
/bin/sh /out/command </dev/null >/out/output 2>&1
code=$?
/run/busybox dmesg >/out/dmesg
echo $code >/out/exit
/run/busybox poweroff -n -f
END
ifconfig lo 127.0.0.1 up
hostname guest

if grep -qw writeback_guest.init=systemd proc/cmdline; then
	# It mounts the rest, and runs the command as one of its services.
	mkdir -p etc/systemd/system/multi-user.target.wants
	cat >etc/systemd/system/guest.service <<-END
		[Service]
		ExecStart=/run/busybox sh /run/guest
	END
	ln -s ../guest.service etc/systemd/system/multi-user.target.wants
	ln -sf /lib/systemd/system/multi-user.target etc/systemd/system/default.target
	exec switch_root /newroot /lib/systemd/systemd
fi

if grep -qw writeback_guest.cgroup=v1 proc/cmdline; then
	# A tree for each controller. Debian has no v1 memory controller since 6.12: it is left to v2.
	mount -t tmpfs cgroup sys/fs/cgroup
	mkdir sys/fs/cgroup/blkio sys/fs/cgroup/memory
	mount -t cgroup -o blkio blkio sys/fs/cgroup/blkio || stop "no v1 blkio controller"
	mount -t cgroup -o memory memory sys/fs/cgroup/memory || rmdir sys/fs/cgroup/memory
else
	mount -t cgroup2 cgroup2 sys/fs/cgroup
	echo "+io +memory" >sys/fs/cgroup/cgroup.subtree_control ||
		stop "no io and memory controllers"
fi
mount -t bpf bpf sys/fs/bpf
mount -t tracefs tracefs sys/kernel/tracing
mount -t debugfs debugfs sys/kernel/debug
mount -t securityfs securityfs sys/kernel/security
mount -t configfs configfs sys/kernel/config 2>/dev/null # a module in some kernels

exec switch_root /newroot /run/busybox sh /run/guest
