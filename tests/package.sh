#!/usr/bin/env bash
# The Debian package: what is in it, what it depends on, and that it runs from where it is unpacked: package.sh BUILD_FOLDER
# (`tools/package --check DIRECTORY` installs it in a clean Debian 12.)
set -euo pipefail
build=$(realpath "$1")
for tool in cpack dpkg-deb dpkg-shlibdeps file readelf; do
  command -v $tool >/dev/null || { echo "$tool is missing"; exit 77; }
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
cpack --config "$build/CPackConfig.cmake" -G DEB -B "$work/made" -D CPACK_DEBIAN_COMPRESSION_TYPE=gzip >log 2>&1 || { cat log; exit 1; }
package=$(echo made/strata_*.deb)
fields=$(dpkg-deb -f "$package" Depends Version Architecture)
for library in libc6 dnnl libfabric libfmt libicu libpcre2 libsentencepiece liburing libxxhash; do
  [[ $fields == *$library* ]] || { echo "the package does not depend on $library: $fields"; exit 1; }
done
dpkg-deb -x "$package" root
for file in usr/bin/strata usr/lib/libstrata.so usr/lib/strata/fabric.so usr/lib/strata/plugins/gpt.so usr/include/strata/plugin.h usr/include/strata/fingerprint.h \
  usr/lib/cmake/Strata/StrataConfig.cmake usr/share/strata/configs/quickstart.toml usr/share/doc/strata/copyright \
  usr/share/doc/strata/docs/plugins.md usr/share/doc/strata/docs/examples/lion/lion.cpp; do
  [[ -s root/$file ]] || { echo "the package lacks $file"; find root -type f; exit 1; }
done
for file in root/usr/bin/strata root/usr/lib/libstrata.so root/usr/lib/strata/fabric.so root/usr/lib/strata/plugins/*.so; do
  if readelf -d "$file" | grep -E 'R(UN)?PATH' | grep -v '\[\$ORIGIN[./a-z]*\]'; then echo "$file names a folder of this machine"; exit 1; fi
done
built=("$build"/lib/strata/plugins/*.so)
[[ $(root/usr/bin/strata plugins | wc -l) == "${#built[@]}" ]] || { root/usr/bin/strata plugins; exit 1; }
grep -q '^memory at the peak' <<<"$(root/usr/bin/strata plan root/usr/share/strata/configs/quickstart.toml)"
echo "package: as expected"
