# SPDX-License-Identifier: Apache-2.0
#
#   make run     start the exporter on this machine (root): http://127.0.0.1:10435/metrics
#   make test    prove it: lint, unit, host, e2e and guest tests
#   make test-matrix   the guest tests on all kernels; other kernels' BTF, compilers, Pythons; packages, systemd, Helm
#
#   make build   prepare all and leave the program at .venv/bin/writeback-exporter
#   make bpf     compile the BPF objects     make lint     ruff, mypy, clang-format, shellcheck
#   make bench   measure (not part of test); ONLY="events process" parts of it
#   make performance   measure, and write docs/performance.md     make wheel    dist/*.whl
#   make soak    half an hour of churn and troubles around one exporter (not part of test); with
#                SOAK_MINUTES=3 a quick look
#   make dashboards   write dashboards, from dashboards/      make rules   alert rules, from alerts/
#   make docs    write docs/metrics.md from the catalogue, docs/kernels.md from what guests say
#   make pictures   draw docs/pictures from a run of the end-to-end test
#   make deb     dist/*.deb, for Debian 12 and later
#   make clean   remove all that these made, except the cache of guest kernels
#
# Each installs what it needs (Debian packages, a virtual environment) and is quick when it is there.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
CLANG ?= clang
VENV := .venv
OBJECTS := exporter/writeback_exporter/objects
BPF := $(patsubst bpf/%.bpf.c,$(OBJECTS)/%.bpf.o,$(wildcard bpf/*.bpf.c))
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

BUILD_PACKAGES := clang llvm libbpf-dev libbpf1 linux-libc-dev python3 python3-venv
QEMU_x86_64 := qemu-system-x86
QEMU_aarch64 := qemu-system-arm
# virtiofsd is a package of its own from Debian 13 on; before, it is in qemu-system-common.
VIRTIOFSD = $(shell apt-cache show virtiofsd >/dev/null 2>&1 && echo virtiofsd)
TEST_PACKAGES = clang-format bpftool e2fsprogs xfsprogs btrfs-progs util-linux kmod busybox-static \
	zstd lz4 dmsetup fio blktrace debootstrap chromium shellcheck $(QEMU_$(shell uname -m)) \
	qemu-system-common $(VIRTIOFSD)

# Go modules: what the chart is rendered with, and the Prometheus operator, which has its own schemas.
HELM := helm.sh/helm/v4/cmd/helm@v4.3.1
HELM3 := helm.sh/helm/v3/cmd/helm@v3.22.0
OPERATOR := github.com/prometheus-operator/prometheus-operator@v0.85.0
MANIFESTS := build/manifests/.made-$(notdir $(HELM))-$(notdir $(HELM3))-$(notdir $(OPERATOR))

DEB_PACKAGES := debhelper dh-python dpkg-dev
MATRIX_PACKAGES := buildah lintian

# Unpacked, not installed: that would start them as services of this machine. promtool is a package
# of its own from Debian 13 on; before, it is in prometheus.
PROMTOOL = $(shell apt-cache show promtool >/dev/null 2>&1 && echo promtool)
MONITORING = prometheus prometheus-alertmanager $(PROMTOOL)
# What the bench measures beside us; their libraries come with clang.
PEERS := libbpf-tools bpfcc-tools python3-bpfcc libbpfcc bpftrace prometheus-node-exporter

.PHONY: run build bpf test test-matrix lint unit host e2e guest bench performance soak dashboards rules docs pictures wheel deb clean

run: build
	$(VENV)/bin/writeback-exporter

build: $(VENV)/.built bpf

bpf: build/packages.build $(BPF)

# -mcpu=v3 has the atomics that the fast path needs; programs for kernels without them use none.
# A warning of a newer clang fails lint, not the build.
BPF_FLAGS = -target bpf -mcpu=v3 -O2 -g -Wall -Wextra -Wno-unused-parameter \
	-idirafter /usr/include/$(shell uname -m)-linux-gnu -DEXPORTER_VERSION='"$(VERSION)"'

# llvm-strip -g drops DWARF and keeps BTF.
$(OBJECTS)/%.bpf.o: bpf/%.bpf.c $(wildcard bpf/*.h) pyproject.toml | build/packages.build
	@mkdir -p $(@D)
	$(CLANG) $(BPF_FLAGS) -c $< -o $@
	llvm-strip -g $@

# $(call install,PACKAGES): installs those that are missing; says what to do where it may not.
define install
	@missing=$$(for p in $(1); do \
		dpkg-query -W -f '$${Status}' $$p 2>/dev/null | grep -q 'ok installed' || echo $$p; \
	done); \
	if [ -n "$$missing" ]; then \
		if [ $$(id -u) != 0 ]; then \
			echo "missing packages:" $$missing "- install them, or run make as root" >&2; exit 1; \
		fi; \
		apt-get update -qq; \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing \
			>build/apt.log 2>&1 || { tail -n 20 build/apt.log >&2; exit 1; }; \
	fi
	@touch $@
endef

build/packages.build: Makefile
	@mkdir -p build
	$(call install,$(BUILD_PACKAGES))

build/packages.deb: Makefile | build/packages.build
	$(call install,$(DEB_PACKAGES))

build/packages.matrix: Makefile | build/packages.deb
	$(call install,$(MATRIX_PACKAGES))

build/packages.test: Makefile | build/packages.build
	$(call install,$(TEST_PACKAGES))

# $(call unpack,PACKAGES): below the target's directory. apt fetches as another user where it can,
# which may not write here; it says so and does it itself.
define unpack
	rm -rf $(@D)
	mkdir -p $(@D)
	[ $$(id -u) != 0 ] || apt-get update -qq
	cd $(@D) && apt-get download -qq $(1) 2>&1 | { grep -v unsandboxed || true; }
	for package in $(@D)/*.deb; do dpkg-deb -x $$package $(@D); done
	@touch $@
endef

build/monitoring/.unpacked: Makefile | build/packages.build
	$(call unpack,$(MONITORING))

build/peers/.unpacked: Makefile | build/packages.build
	$(call unpack,$(PEERS))

$(VENV)/.manifests: $(VENV)/.tested
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -e '.[manifests]'
	@touch $@

# Compiled, in four minutes of CPU: Debian has no Helm, and Debian 12 no Go that compiles it, but the
# virtual environment has one. What it leaves in its caches, 2 GB, is of no further use.
$(MANIFESTS): | $(VENV)/.manifests
	rm -rf $(@D)
	mkdir -p $(@D)/helm $(@D)/helm3
	export GOPATH=$(CURDIR)/$(@D)/go GOCACHE=$(CURDIR)/$(@D)/cache GOFLAGS=-modcacherw CGO_ENABLED=0; \
	GOBIN=$(CURDIR)/$(@D)/helm $(VENV)/bin/go install $(HELM); \
	GOBIN=$(CURDIR)/$(@D)/helm3 $(VENV)/bin/go install $(HELM3); \
	$(VENV)/bin/go mod download $(OPERATOR); \
	cp -r $$($(VENV)/bin/go env GOMODCACHE)/$(OPERATOR)/example/prometheus-operator-crd $(@D)/operator
	rm -rf $(@D)/go $(@D)/cache
	@touch $@

$(VENV)/.built: pyproject.toml hatch_build.py | bpf
	[ -x $(VENV)/bin/python ] || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.tested: $(VENV)/.built
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@

test: lint unit host e2e guest

lint: build $(VENV)/.tested build/packages.test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	for source in bpf/*.bpf.c tests/*/*.bpf.c; do $(CLANG) $(BPF_FLAGS) -Werror -fsyntax-only $$source; done
	clang-format --style=file:bpf/.clang-format --dry-run -Werror bpf/*.[ch] tests/*/*.bpf.c
	shellcheck .ci/run packaging/*.sh packaging/debian/*.prerm packaging/debian/*.postrm

unit host e2e guest: build $(VENV)/.tested build/packages.test build/monitoring/.unpacked
	$(VENV)/bin/python -m pytest tests/$@

test-matrix: build $(VENV)/.tested build/packages.test build/packages.matrix \
		build/monitoring/.unpacked $(VENV)/.manifests $(MANIFESTS)
	GUEST_KERNELS="5.10 6.1 6.12 6.18 7.3" $(VENV)/bin/python -m pytest tests/guest tests/matrix

bench performance: build $(VENV)/.tested build/packages.test build/peers/.unpacked

bench:
	$(VENV)/bin/python -m tests.bench $(ONLY)

performance:
	$(VENV)/bin/python -m tests.bench $(ONLY) --output docs/performance.md

SOAK_MINUTES ?= 30

soak: build $(VENV)/.tested build/packages.test
	$(VENV)/bin/python -m tests.soak --minutes=$(SOAK_MINUTES)
	$(VENV)/bin/python -m tests.soak --minutes=$(SOAK_MINUTES) --guest

dashboards: $(VENV)/.tested
	$(VENV)/bin/python -m dashboards

rules: $(VENV)/.tested
	$(VENV)/bin/python -m alerts

docs: build $(VENV)/.tested build/packages.test
	$(VENV)/bin/python -m writeback_exporter.metrics.reference >docs/metrics.md
	$(VENV)/bin/python -m tests.guest.offer

# Not part of docs: each run is another one.
pictures: build $(VENV)/.tested build/packages.test build/monitoring/.unpacked
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -e '.[pictures]'
	$(VENV)/bin/python -m tests.e2e.pictures

wheel: build
	$(VENV)/bin/pip wheel --quiet --disable-pip-version-check --no-deps -w dist .

deb: wheel build/packages.deb
	packaging/deb.sh dist/writeback_exporter-$(VERSION)-py3-none-any.whl

clean:
	rm -rf $(VENV) build dist $(OBJECTS) .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
