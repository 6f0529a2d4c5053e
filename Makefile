# SPDX-License-Identifier: MIT
#
# offstage: `make help` lists the targets. All output goes under $(BUILD); a no-change make does nothing.
#
#	make BUILD=build/asan SANITIZE=address,undefined check-unit
#	make BUILD=build/clang CC=clang WERROR=1

BUILD	?= build
PREFIX	?= /usr/local
DESTDIR	?=
PYTHON	?= python3
CROSS_AARCH64 ?= aarch64-linux-gnu-gcc
QEMU_AARCH64 ?= qemu-aarch64-static

VERSION	:= $(shell awk '/define OFFSTAGE_VERSION_(MAJOR|MINOR|PATCH)/ { v = v s $$3; s = "." } END { print v }' include/offstage.h)
SOVERSION := 0

OPT	?= -O2 -g
CFLAGS	?= $(OPT)
BASE	:= -std=gnu11 -Wall -Wextra -Wstrict-prototypes -Wmissing-prototypes -Wvla -pthread -D_GNU_SOURCE \
	   -Iinclude -Ilib -include $(BUILD)/config.h -MMD -MP
ifdef SANITIZE
BASE	+= -fsanitize=$(SANITIZE) -fno-omit-frame-pointer -fno-sanitize-recover=all
LDFLAGS	+= -fsanitize=$(SANITIZE)
endif
ifdef WERROR
BASE	+= -Werror
endif
LIBCFLAGS := -fPIC -fvisibility=hidden

# ---- sources ----------------------------------------------------------------------------------------------------------

ARCH	:= $(firstword $(subst -, ,$(shell $(CC) -dumpmachine 2> /dev/null)))
ADAM_x86_64 := adam_avx2 adam_avx512 adam_avx512bf16
ADAM_aarch64 := adam_neon
ADAM_NAMES := adam_c $(ADAM_$(ARCH))
# Files of the arithmetic for other CPUs than the target's.
ADAM_FOREIGN := $(filter-out $(ADAM_NAMES),adam_avx2 adam_avx512 adam_avx512bf16 adam_neon)
LIB_NAMES := $(filter-out $(ADAM_FOREIGN),$(basename $(notdir $(wildcard lib/*.c))))

# The arithmetic is the same bits in every build: no contraction behind our back, and only these files know an ISA.
ARITHMETIC := -O3 -ffp-contract=off -fno-math-errno
ISA_adam_avx2 := -mavx2 -mfma -mf16c
ISA_adam_avx512 := $(ISA_adam_avx2) -mavx512f -mavx512bw -mavx512vl -mavx512dq
ISA_adam_avx512bf16 := $(ISA_adam_avx512) -mavx512bf16

LIB_OBJS := $(LIB_NAMES:%=$(BUILD)/lib/%.o)
TOOL_OBJS := $(patsubst %.c,$(BUILD)/%.o,$(wildcard tools/*.c tests/bench/*.c))
COMMAND_OBJS := $(patsubst %,$(BUILD)/tools/%.o,arguments buffers doctor facts json pool)
UNIT_NAMES := $(basename $(notdir $(wildcard tests/unit/test_*.c)))
UNIT_BINS := $(UNIT_NAMES:%=$(BUILD)/unit/%)

LIBS	= $(shell cat $(BUILD)/config.libs) -lm -pthread
SO	:= $(BUILD)/liboffstage.so.$(SOVERSION)

.PHONY: all help check check-unit check-python check-neon check-abi check-command check-install bench install uninstall clean
.DELETE_ON_ERROR:
all: $(SO) $(BUILD)/liboffstage.so $(BUILD)/liboffstage.a $(BUILD)/offstage

help:
	@echo 'all            library, static library and command under $(BUILD)/'
	@echo 'check          every test that needs no other build; check-unit, check-python, check-neon, check-abi,'
	@echo '               check-command, check-install are its parts (scripts/check also runs them under sanitizers and valgrind)'
	@echo 'modules        offstage.ko for KDIR=$(KDIR), under $(BUILD)/kmod/; install-module puts it'
	@echo '               there, uninstall-module takes it back; check-module-style and check-dkms: compilers, sparse, dkms'
	@echo 'check-kmod     tests on a kernel that has it loaded: scripts/vm --kernel 6.12 make check-kmod'
	@echo 'bench          benchmarks, JSON under $(BUILD)/bench/'
	@echo 'install        PREFIX=$(PREFIX) DESTDIR=$(DESTDIR), with the module'"'"'s sources for dkms; uninstall takes back exactly that'

# ---- configuration: what a compile probe finds, in config.h and config.libs ----------------------------------------------

$(BUILD)/config.h: scripts/configure
	@mkdir -p $(@D)
	@CC="$(CC)" scripts/configure $(BUILD)
$(BUILD)/config.libs: $(BUILD)/config.h

# ---- library --------------------------------------------------------------------------------------------------------------

$(LIB_OBJS): $(BUILD)/lib/%.o: lib/%.c $(BUILD)/config.h Makefile
	@mkdir -p $(@D)
	$(CC) $(BASE) $(CFLAGS) $(LIBCFLAGS) $(if $(filter adam_c adam_avx% adam_neon,$*),$(ARITHMETIC)) $(ISA_$*) -c -o $@ $<

$(SO): $(LIB_OBJS) lib/liboffstage.map
	$(CC) -shared -Wl,-soname,$(@F) -Wl,--version-script=lib/liboffstage.map $(if $(SANITIZE),,-Wl,-z,defs) \
		$(LDFLAGS) -o $@ $(LIB_OBJS) $(LIBS)
$(BUILD)/liboffstage.so: $(SO)
	ln -sf $(<F) $@

# One object with everything but offstage_* made local: a static link can't clash with the program's own names.
$(BUILD)/liboffstage.a: $(LIB_OBJS)
	ld -r -o $(BUILD)/liboffstage.o $^
	objcopy --localize-hidden $(BUILD)/liboffstage.o
	rm -f $@
	ar rcs $@ $(BUILD)/liboffstage.o

$(TOOL_OBJS): $(BUILD)/%.o: %.c $(BUILD)/config.h Makefile
	@mkdir -p $(@D)
	$(CC) $(filter-out -Ilib,$(BASE)) $(CFLAGS) -c -o $@ $<
$(BUILD)/offstage: $(TOOL_OBJS) $(SO) $(BUILD)/liboffstage.so
	$(CC) $(LDFLAGS) -o $@ $(TOOL_OBJS) -L$(BUILD) -loffstage -Wl,-rpath,'$$ORIGIN:$$ORIGIN/../lib' -lm -pthread

# ---- tests ------------------------------------------------------------------------------------------------------------------

# Unit tests link the objects themselves, so that they can reach what the library hides.
$(BUILD)/unit/%: tests/unit/%.c $(LIB_OBJS) $(BUILD)/config.h
	@mkdir -p $(@D)
	$(CC) $(BASE) $(CFLAGS) $(LDFLAGS) -MF $@.d -o $@ $< $(LIB_OBJS) -lcmocka $(LIBS)

# So do those of the command: main() stays out, and a path or a call of the module can be one of the test's own.
$(BUILD)/unit/test_tools: LIB_OBJS += $(COMMAND_OBJS)
$(BUILD)/unit/test_tools: $(COMMAND_OBJS)

check: all
	$(MAKE) check-unit
	$(MAKE) check-neon
	$(MAKE) check-abi
	$(MAKE) check-command
	$(MAKE) check-install
	$(MAKE) check-python

check-unit: $(UNIT_BINS)
	@scripts/run-unit $(UNIT_BINS)

check-python: all
	@scripts/run-python

# The arithmetic for another CPU, run under emulation, against this CPU's: the digests must be the same text.
ADAM_PURE := lib/error.c $(filter-out lib/adam_call.c lib/adam_avx%.c lib/adam_neon.c,$(wildcard lib/adam*.c))
$(BUILD)/neon/adam_digest: tests/unit/adam_digest.c $(ADAM_PURE) lib/adam_neon.c $(wildcard lib/adam*.h) include/offstage.h Makefile
	@mkdir -p $(@D)
	$(CROSS_AARCH64) -std=gnu11 -Wall -Wextra -D_GNU_SOURCE -Iinclude -Ilib $(ARITHMETIC) -static -o $@ $< $(ADAM_PURE) \
		lib/adam_neon.c -lm
$(BUILD)/unit/adam_digest: tests/unit/adam_digest.c $(LIB_OBJS) $(BUILD)/config.h
	@mkdir -p $(@D)
	$(CC) $(BASE) $(CFLAGS) $(LDFLAGS) -MF $@.d -o $@ $< $(LIB_OBJS) $(LIBS)
check-neon: $(BUILD)/unit/adam_digest
	@CROSS="$(CROSS_AARCH64)" QEMU="$(QEMU_AARCH64)" MAKE="$(MAKE)" BUILD="$(BUILD)" scripts/run-neon

check-abi: all
	@CC="$(CC)" scripts/run-abi $(BUILD)

check-command: all
	@scripts/run-command $(BUILD)

check-install: all
	@CC="$(CC)" MAKE="$(MAKE)" scripts/run-install $(BUILD)

bench: all
	@tests/bench/run $(BUILD)

# ---- the kernel module -------------------------------------------------------------------------------------------------------

# Built in a copy, so that the sources stay as they are. With no KDIR, for the kernel that runs. KUNIT=1 builds the suites
# in kmod/*_test.c into it.
KDIR	?= /lib/modules/$(shell uname -r)/build
MODULE_SOURCES := $(wildcard kmod/*.c kmod/*.h kmod/Kbuild kmod/probe/*.c) include/uapi/linux/offstage.h

# build_module,SOURCES,THEIR DIRECTORY
define build_module
	@[ -e "$(KDIR)/Makefile" ] || { echo "make $@: $(KDIR) has no kernel to build for: install its headers (Debian: linux-headers-amd64), or name another by KDIR=" >&2; exit 1; }
	@for f in $(1); do \
		cmp -s $$f $(BUILD)/$$f || install -D -m 644 $$f $(BUILD)/$$f || exit 1; \
	done
	$(MAKE) -C "$(KDIR)" M="$(abspath $(BUILD)/$(2))" $(MODULE_FLAGS) modules
endef

.PHONY: modules test-modules install-module uninstall-module check-module-style check-dkms check-kmod kmod-tests
modules:
	$(call build_module,$(MODULE_SOURCES),kmod)
# Mock devices that tests in the virtual machine load.
test-modules:
	$(call build_module,$(wildcard tests/kmod/*.c tests/kmod/Kbuild),tests/kmod)

# For one kernel, without dkms. Not modules_install: it leaves depmod out where headers have no System.map, and
# kernelrelease isn't always the name of Debian's 6.1.
RELEASE	= $(or $(shell sed -n 's/.*UTS_RELEASE "\(.*\)".*/\1/p' "$(KDIR)/include/generated/utsrelease.h"),$(error name a kernel by KDIR=))
install-module: modules
	install -D -m 644 $(BUILD)/kmod/offstage.ko "$(DESTDIR)/lib/modules/$(RELEASE)/updates/offstage.ko"
	$(if $(DESTDIR),,depmod "$(RELEASE)")
uninstall-module:
	rm -f "$(DESTDIR)/lib/modules/$(RELEASE)/updates/offstage.ko"
	$(if $(DESTDIR),,depmod "$(RELEASE)")

# Both for the kernels that KERNELS names, 6.1 and 6.12 by default.
check-module-style:
	@MAKE="$(MAKE)" scripts/run-module-style $(BUILD)
check-dkms:
	@MAKE="$(MAKE)" scripts/run-dkms $(BUILD)

# Needs a kernel with offstage.ko loaded: `scripts/vm --kernel 6.12 make check-kmod`, which makes kmod-tests before, since
# nothing is compiled in there. The unit tests run on the provider `kmod` then.
# The fuzzer leaves its mark in the counts, and comes last.
VM_TESTS := $(patsubst tests/vm/%.c,$(BUILD)/vm-tests/%,$(filter-out %/fuzz.c,$(wildcard tests/vm/*.c)) tests/vm/fuzz.c)
$(BUILD)/vm-tests/%: tests/vm/%.c include/uapi/linux/offstage.h
	@mkdir -p $(@D)
	$(CC) -std=gnu11 -Wall -Wextra -D_GNU_SOURCE $(CFLAGS) -MMD -MP -o $@ $< -lcmocka -lnuma -luring
kmod-tests: $(VM_TESTS) $(UNIT_BINS) $(BUILD)/offstage
# All of them speak TAP, as cmocka does.
check-kmod: kmod-tests
	@scripts/run-unit tests/vm/kunit-check tests/vm/kunit $(VM_TESTS) tests/vm/test_fio $(UNIT_BINS)

# ---- installation -------------------------------------------------------------------------------------------------------------

BINDIR	?= $(PREFIX)/bin
LIBDIR	?= $(PREFIX)/lib
INCLUDEDIR ?= $(PREFIX)/include
MANDIR	?= $(PREFIX)/share/man
# dkms looks in /usr/src: with another PREFIX it is told the path.
SRCDIR	?= $(PREFIX)/src
DKMS_TREE ?= /var/lib/dkms
MODULE_TREE = $(SRCDIR)/offstage-$(VERSION)
MODULE_TREE_FILES := dkms.conf Kbuild $(MODULE_SOURCES)
# In $(PREFIX)/lib, where udev and its like look if PREFIX is /usr or /usr/local.
SYSTEM_FILES := $(patsubst packaging/%,%,$(wildcard packaging/*.d/* packaging/udev/rules.d/*))
# Debian's own prefix has one directory for every python3; others have one per version.
PYTHONDIR ?= $(if $(filter /usr,$(PREFIX)),/usr/lib/python3/dist-packages,$(PREFIX)/lib/python$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')/dist-packages)

INSTALLED = $(BINDIR)/offstage $(LIBDIR)/liboffstage.so.$(SOVERSION) $(LIBDIR)/liboffstage.so $(LIBDIR)/liboffstage.a \
	    $(INCLUDEDIR)/offstage.h $(INCLUDEDIR)/linux/offstage.h $(LIBDIR)/pkgconfig/offstage.pc \
	    $(foreach m,$(wildcard man/*.[1-9]),$(MANDIR)/man$(subst .,,$(suffix $m))/$(notdir $m)) \
	    $(foreach p,$(wildcard python/offstage/*.py),$(PYTHONDIR)/offstage/$(notdir $p)) \
	    $(MODULE_TREE_FILES:%=$(MODULE_TREE)/%) $(SYSTEM_FILES:%=$(PREFIX)/lib/%)

install: all
	install -d $(DESTDIR)$(BINDIR) $(DESTDIR)$(LIBDIR)/pkgconfig $(DESTDIR)$(INCLUDEDIR) $(DESTDIR)$(PYTHONDIR)/offstage
	install -m 755 $(BUILD)/offstage $(DESTDIR)$(BINDIR)/
	install -m 755 $(SO) $(DESTDIR)$(LIBDIR)/
	ln -sf liboffstage.so.$(SOVERSION) $(DESTDIR)$(LIBDIR)/liboffstage.so
	install -m 644 $(BUILD)/liboffstage.a $(DESTDIR)$(LIBDIR)/
	install -m 644 include/offstage.h $(DESTDIR)$(INCLUDEDIR)/
	install -D -m 644 include/uapi/linux/offstage.h $(DESTDIR)$(INCLUDEDIR)/linux/offstage.h
	printf 'prefix=%s\nlibdir=%s\nincludedir=%s\n\nName: offstage\nDescription: staging memory and host Adam for an offloaded optimizer\nVersion: %s\nLibs: -L$${libdir} -loffstage\nLibs.private: %s\nCflags: -I$${includedir}\n' \
		'$(PREFIX)' '$(LIBDIR)' '$(INCLUDEDIR)' '$(VERSION)' '$(strip $(LIBS))' > $(DESTDIR)$(LIBDIR)/pkgconfig/offstage.pc
	chmod 644 $(DESTDIR)$(LIBDIR)/pkgconfig/offstage.pc
	for m in $(wildcard man/*.[1-9]); do install -D -m 644 $$m $(DESTDIR)$(MANDIR)/man$${m##*.}/$${m##*/} || exit 1; done
	install -m 644 $(wildcard python/offstage/*.py) $(DESTDIR)$(PYTHONDIR)/offstage/
	for f in $(MODULE_TREE_FILES); do install -D -m 644 $$f $(DESTDIR)$(MODULE_TREE)/$$f || exit 1; done
	for f in $(SYSTEM_FILES); do install -D -m 644 packaging/$$f $(DESTDIR)$(PREFIX)/lib/$$f || exit 1; done

# Files by name, then directories of ours alone; shared directories stay if somebody else has something in them.
uninstall:
	@[ "$$(readlink $(DKMS_TREE)/offstage/$(VERSION)/source)" != "$(DESTDIR)$(MODULE_TREE)" ] || { echo "make uninstall: dkms builds the module from $(MODULE_TREE): run dkms remove offstage/$(VERSION) --all first" >&2; exit 1; }
	rm -f $(INSTALLED:%=$(DESTDIR)%)
	rm -rf $(DESTDIR)$(PYTHONDIR)/offstage/__pycache__
	-rmdir $(DESTDIR)$(PYTHONDIR)/offstage 2>/dev/null
	-find $(DESTDIR)$(MODULE_TREE) -depth -type d -empty -delete 2>/dev/null

clean:
	rm -rf $(BUILD)

-include $(LIB_OBJS:.o=.d) $(TOOL_OBJS:.o=.d) $(wildcard $(BUILD)/unit/*.d $(BUILD)/vm-tests/*.d)
