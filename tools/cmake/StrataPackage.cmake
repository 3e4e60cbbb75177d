# A Debian package of the install tree: `tools/package` (or `cpack -G DEB` in a built folder). What it depends on is found by
# dpkg-shlibdeps, so it fits the release that it was built on.
install(FILES LICENSE DESTINATION share/doc/strata RENAME copyright)
install(FILES README.md CHANGELOG.md CONTRIBUTING.md DESTINATION share/doc/strata)
install(DIRECTORY docs DESTINATION share/doc/strata)

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME strata)
set(CPACK_PACKAGE_VENDOR "Strata")
set(CPACK_PACKAGE_CONTACT "The Strata maintainers <strata@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "trains large neural networks on limited memory")
set(CPACK_DEBIAN_PACKAGE_DESCRIPTION "A model, a memory budget and a list of strategies (recomputation, offload, ZeRO, 8-bit
optimizers, mixed precision) become one planned step program. With headers and
a CMake package for plugins of one's own.")
set(CPACK_PACKAGE_DIRECTORY ${CMAKE_BINARY_DIR})
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_THREADS 0)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_COMPRESSION_TYPE xz)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PACKAGE_SUGGESTS "g++, cmake, ninja-build")
# What `data prepare` renders chat templates with.
set(CPACK_DEBIAN_PACKAGE_DEPENDS "python3, python3-jinja2")
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
# Its own library is in the package and in no other.
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS ${CMAKE_BINARY_DIR}/lib)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS OFF)
include(CPack)
