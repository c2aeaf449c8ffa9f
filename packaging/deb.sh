#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes dist/writeback-exporter_VERSION_all.deb of a wheel. No Debian release has the build backend
# that pyproject.toml asks for, hence not pybuild.
#
#   packaging/deb.sh WHEEL
set -eu
wheel=$(realpath "$1")
cd "$(dirname "$0")/.."
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
source=build/deb/writeback-exporter-$version

rm -rf build/deb
rm -f dist/*.deb
mkdir -p "$source" dist
python3 -m zipfile -e "$wheel" "$source/lib"
rm "$source"/lib/*.dist-info/RECORD # installed, it would be dpkg's business
cp -r packaging/debian packaging/writeback-exporter packaging/writeback-exporter.1 CHANGELOG.md "$source"
mkdir "$source/docs" "$source/examples"
cp docs/*.md "$source/docs"
cp packaging/systemd/*.conf "$source/examples"
cp packaging/systemd/writeback-exporter.service packaging/systemd/*.socket "$source/debian"

# The date of all that is in the package, so that the same commit gives the same one.
date=$(git log -1 --format=%cD 2>/dev/null || date -R)
maintainer=$(sed -n 's/^Maintainer: //p' packaging/debian/control)
cat >"$source/debian/changelog" <<END
writeback-exporter ($version-1) unstable; urgency=medium

  * See changelog.gz.

 -- $maintainer  $date
END

cd "$source"
# Unchecked: `make deb` installs what is needed, and build-essential, a C compiler, is not.
dpkg-buildpackage --build=binary --no-sign --no-check-builddeps >../build.log 2>&1 || {
	tail -n 20 ../build.log >&2
	exit 1
}
mv ../*.deb ../../../dist
