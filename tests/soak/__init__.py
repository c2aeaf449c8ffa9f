# SPDX-License-Identifier: Apache-2.0
"""A long life in a short time: one exporter, watched by a scrape every few seconds, while cgroups,
disks and clients come and go around it, and things break that do break in months.

    make soak                                   # 30 minutes here, then 8 in a guest; as root
    SOAK_MINUTES=3 make soak                    # a quick check of both
    python -m tests.soak --minutes=3            # of this machine alone
    python -m tests.soak --guest --minutes=3    # of the guest alone

Per 30 minutes 100,000 cgroups are made and removed. `churners` is what comes and goes, `troubles`
what breaks, `checks` what must hold at each scrape and at the end; `__main__` runs them and ends
with a table: what was checked, how it began, how it ended, the verdict. The exit status is 1 where
anything fails. How long a figure is allowed to take follows from the exporter's own promises: the
series of a cgroup or disk that has gone stay for RETENTION_SECONDS (names/cgroups.py), so until
then memory grows with the churn, and only after that it must be flat.

On a host all is below cgroups of its own, and nothing of the machine as a whole is touched. What
others do there is collapsed (--cgroup.include), yet costs memory: a quiet machine tells most. All
else is as by default, with every collector that the machine allows. The guest has cgroup v2 alone,
with fentry, and its clock is stepped by hours all the time.
"""
