#!/bin/sh
# Installs the distribution's Chromium for the browser tests, where there is none and nobody has to be asked for a password.
# It never fails: where it can do nothing, those tests say what there is to do.
for name in "$NBDIST_CHROMIUM" chromium chromium-browser google-chrome google-chrome-stable; do
    if [ -n "$name" ] && command -v "$name" >/dev/null; then exit 0; fi
done
# Ubuntu's package only calls snap, which a container has not.
command -v apt-get >/dev/null && ! grep -qi ubuntu /etc/os-release || exit 0
if [ "$(id -u)" = 0 ]; then as_root=""
elif sudo -n true 2>/dev/null; then as_root="sudo -n"
else exit 0; fi

install() {
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 install -y --no-install-recommends \
        chromium fonts-dejavu-core >/dev/null 2>&1
}
echo "installing Chromium for the browser tests (once)"
# The lists of packages may be old, or not there at all.
install || { $as_root apt-get -qq update >/dev/null 2>&1; install; } || echo "apt-get could not install Chromium"
exit 0
